"""What a worker keeps for a subscriber that has no room: every output, with the tokens of a sequence merged."""

import asyncio

from workers.mailbox import Mailbox
from workers.request import FailedOut, FinishReason, SequenceTiming, TokensOut

TIMING = SequenceTiming(0.0, 0.0, 0.1)


def tokens(
    key: str, first: int, *values: int, finish: FinishReason | None = None, prefilled: bool = False
) -> TokensOut:
    return TokensOut(key, first, values, TIMING, finish=finish, prefilled=prefilled)


async def test_tokens_of_each_sequence_are_merged_although_others_come_between() -> None:
    mailbox = Mailbox()
    for position in range(1, 5):
        for key in ("a", "b"):
            mailbox.put(tokens(key, position, 10 * position))
    assert await mailbox.take(60.0) == (tokens("a", 1, 10, 20, 30, 40), tokens("b", 1, 10, 20, 30, 40))
    mailbox.put(tokens("a", 5, 50, finish=FinishReason.LENGTH))
    assert await mailbox.take(60.0) == (tokens("a", 5, 50, finish=FinishReason.LENGTH),)
    mailbox.close()


async def test_a_first_token_a_last_token_and_a_gap_are_kept_apart() -> None:
    mailbox = Mailbox()
    outputs = (
        tokens("a", 0, 1, prefilled=True),
        tokens("a", 1, 2),
        tokens("b", 3, 4),
        tokens("a", 2, 3, finish=FinishReason.STOP),
        tokens("b", 7, 8),
        FailedOut("b", "lost"),
    )
    for output in outputs:
        mailbox.put(output)
    ended = tokens("a", 1, 2, 3, finish=FinishReason.STOP)
    assert await mailbox.take(60.0) == (outputs[0], ended, outputs[2], outputs[4], outputs[5])
    mailbox.close()


async def test_a_wait_ends_with_an_output_a_heartbeat_or_the_mailbox() -> None:
    mailbox = Mailbox()
    waiting = asyncio.ensure_future(mailbox.take(60.0))
    await asyncio.sleep(0)
    mailbox.put(tokens("a", 0, 1))
    assert await waiting == (tokens("a", 0, 1),)
    assert await mailbox.take(0.001) == ()
    waiting = asyncio.ensure_future(mailbox.take(60.0))
    await asyncio.sleep(0)
    mailbox.close()
    assert await waiting == ()
