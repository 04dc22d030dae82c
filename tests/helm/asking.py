"""`asking.py ENDPOINT PROMPTS TOKENS AT_ONCE` asks a cluster the same prompts until its input ends, each at least once.

PROMPTS is a file of JSON. A line of JSON for each answer: which prompt, its tokens, whether it was asked for again; or
what failed.
"""

import asyncio
import json
import sys
from pathlib import Path

from diptych.client import AsyncClient
from diptych.errors import DiptychError
from diptych.retry import Retry


async def main(endpoint: str, prompts: list[str], max_tokens: int, at_once: int) -> None:
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.run_in_executor(None, lambda: (sys.stdin.read(), loop.call_soon_threadsafe(over.set)))

    async def ask(client: AsyncClient, name: str, turn: int) -> None:
        received: dict[str, object] = {"prompt": turn % len(prompts)}
        prompt = prompts[turn % len(prompts)]
        try:
            answer = await client.complete(prompt, max_tokens=max_tokens, temperature=0.0, request_id=name)
            received |= {"tokens": answer.output.tokens, "attempts": answer.completed.attempts}
            received["again"] = answer.accepted.request_id != name
        except DiptychError as error:
            received["error"] = f"{error.code} {error.reason}: {error}"
        print(json.dumps(received), flush=True)

    async def stay(lane: int) -> None:
        """One connection for all requests; the first lane makes a new one for each."""
        turn, client = lane, AsyncClient(endpoint, retry=Retry())
        while not over.is_set() or turn < len(prompts):
            await ask(client, f"ask-{lane}-{turn}", turn)
            turn += at_once
            if not lane:
                await client.close()
                client = AsyncClient(endpoint, retry=Retry())
        await client.close()

    await asyncio.gather(*(stay(lane) for lane in range(at_once)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), int(sys.argv[3]), int(sys.argv[4])))
