"""Answers with many log probabilities are written down apart from the event loop, where others' tokens are due."""

import threading
from collections.abc import AsyncIterator, Collection
from typing import Any

import pytest

from cluster.frontend.http.reply import MAX_LOGPROBS
from tests.frontend.grpc.fake import FakeDispatcher
from tests.frontend.http.opened import Clients, opened
from tests.frontend.tokenizers import ByteDetokenizer, ByteTokenizer

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 200, "logprobs": True, "top_logprobs": 20}
SCORES = {"prompt": "sea " * 500, "echo": True, "max_tokens": 0, "logprobs": 5, "n": 2}


class Watched(ByteTokenizer):
    """Counts what is decoded, by thread."""

    def __init__(self) -> None:
        self.decoded: dict[int, int] = {}

    def detokenizer(self, *, skip_special_tokens: bool = True, keep: Collection[int] = ()) -> ByteDetokenizer:
        thread = threading.get_ident()
        self.decoded[thread] = self.decoded.get(thread, 0) + 1
        return super().detokenizer()


@pytest.fixture
def tokenizer() -> Watched:
    return Watched()


@pytest.fixture
async def there(dispatcher: FakeDispatcher, tokenizer: Watched) -> AsyncIterator[Clients]:
    async with opened(dispatcher, lambda: tokenizer) as (clients, _):
        yield clients


@pytest.mark.parametrize(
    ("path", "body", "least"),
    [
        ("/v1/chat/completions", CHAT, 4200),
        ("/v1/completions", SCORES, 4000),
        ("/v1/completions", SCORES | {"stream": True, "n": 1}, 2000),
    ],
    ids=["chat", "scores", "streamed scores"],
)
async def test_a_long_answer_is_encoded_in_a_thread(
    there: Clients, tokenizer: Watched, path: str, body: dict[str, Any], least: int
) -> None:
    answer = await there.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    in_the_loop = tokenizer.decoded.get(threading.get_ident(), 0)
    assert sum(tokenizer.decoded.values()) >= least and in_the_loop <= MAX_LOGPROBS
