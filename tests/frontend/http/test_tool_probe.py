"""canitoolcall's probe of a live endpoint, unmodified, where the model answers as it should: scripted answers.

`make clients` creates its environment, and runs it with a real model, too small to choose tools.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clients.__main__ import PROBE
from benchmarks.environments import CANITOOLCALL
from cluster.events import Completed, Event
from tests.frontend.grpc.fake import FakeDispatcher
from tests.frontend.http.opened import opened
from tests.frontend.tokenizers import ToolTokenizer
from workers.request import FinishReason, Request

pytestmark = pytest.mark.campaign
EVENT = {
    "title": "Design review",
    "attendees": [{"name": "Ana", "email": "ana@example.com"}, {"name": "Bo", "email": "bo@example.com"}],
    "location": {"city": "Berlin", "room": "4.12"},
}
NOTE = {"title": "Grüße aus Zürich", "body": "Café ☕ in 東京 — naïve résumé 🚀"}


def call(name: str, **arguments: Any) -> str:
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


# By words of the last message.
ANSWERS = {
    "in Paris right now": call("get_weather", city="Paris"),
    "in Tokyo": call("get_weather", city="Paris") + "\n" + call("get_weather", city="Tokyo"),
    "17 + 25": "42",
    "Design review": call("create_event", **EVENT),
    "Zürich": call("save_note", **NOTE),
    "on the server": call("get_server_time"),
    "Lisbon": call("get_weather", city="Lisbon"),
    "temp_c": "18 degrees, and clear.",
    "9.11": "<think>\n9.9 is 9.90.\n</think>\n\n" + call("record_answer", answer="9.9"),
}


def script(request: Request) -> bytes:
    messages, _ = json.loads(bytes(request.prompt).decode())
    (answer,) = (answer for words, answer in ANSWERS.items() if words in messages[-1]["content"])
    return answer.encode()


class EndingDispatcher(FakeDispatcher):
    """Its answers are not cut."""

    async def generate(self, *given: Any, **options: Any) -> AsyncGenerator[Event, None]:
        async with aclosing(super().generate(*given, **options)) as events:
            async for event in events:
                yield replace(event, finish=FinishReason.EOS) if isinstance(event, Completed) else event


async def test_each_scenario_passes_streamed_or_not(tmp_path: Path) -> None:
    if why := CANITOOLCALL.missing():
        pytest.skip(why)
    async with opened(EndingDispatcher(script), ToolTokenizer) as (clients, _):
        command = [*PROBE, "--base-url", f"{clients.http.base_url}/v1", "--model", "bytes", "--json", "report.json"]
        probe = await asyncio.create_subprocess_exec(*command, cwd=tmp_path)
        assert await probe.wait() == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["summary"] == {"pass": 27, "fail": 0, "error": 0, "skip": 0}
    assert not any(each["warnings"] for each in report["outcomes"])
