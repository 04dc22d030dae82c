"""The page at /ui in a real browser: what a person sees, and that whatever the cluster says stays text."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from cluster.spec import Role
from diptych.history import ClusterEvent, Recent
from diptych.view import PoolView
from tests.frontend.grpc.fake import FakeDispatcher, view
from tests.frontend.http.chromium import LOOK_S, WAIT_S, Page, browser, installed, page
from tests.frontend.http.opened import Clients, opened
from tests.frontend.http.test_ui import KEY, trace
from tests.frontend.tokenizers import ToolTokenizer

pytestmark = pytest.mark.skipif(installed() is None, reason="needs a browser: apt-get install chromium")

EVIL = "<img src=x onerror=\"document.title='owned'\">"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with browser(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture
async def tab(address: str) -> AsyncIterator[Page]:
    async with page(address) as made:
        yield made


def url(there: Clients) -> str:
    return f"{there.http.base_url}".rstrip("/")


async def test_the_page_shows_pools_workers_streams_and_events(
    tab: Page, there: Clients, dispatcher: FakeDispatcher
) -> None:
    pools = (PoolView("prefill", Role.PREFILL, 1, 1, 1), PoolView("decode", Role.DECODE, 2, 1, 2))
    dispatcher.view = replace(view(), pools=pools)
    dispatcher.traces = [trace(1)]
    dispatcher.past = Recent(75.0, (), ((3.0, ClusterEvent(0, "back", "decode-0", "after 2 s")),))
    await tab.open(f"{url(there)}/ui")
    await tab.until("document.querySelectorAll('#workers .worker').length === 2")
    table = await tab.value("document.getElementById('workers').innerText")
    assert "1 of 2 ready" in table and "decode-0" in table and "56 of 256" in table
    assert "req-1" in await tab.value("document.getElementById('streams').innerText")
    assert "back · decode-0 · after 2 s" in await tab.value("document.getElementById('events').innerText")
    assert "1 min 15 s" in await tab.value("document.getElementById('figures').innerText")
    assert tab.complaints == [] and {each.split("/ui")[0] for each in tab.requested} <= {url(there), "data:,"}


async def test_the_page_shows_names_as_text(tab: Page, there: Clients, dispatcher: FakeDispatcher) -> None:
    workers = [structs.replace(each, name=EVIL, pool=EVIL, detail=EVIL) for each in view().workers]
    model = replace(view().model, name=EVIL)  # type: ignore[type-var]
    dispatcher.view = replace(view(), name=EVIL, model=model, workers=tuple(workers))
    dispatcher.traces = [replace(trace(1), request_id=EVIL, class_name=EVIL, phase=EVIL, decode_worker=EVIL)]
    dispatcher.past = Recent(1.0, (), ((3.0, ClusterEvent(0, EVIL, EVIL, EVIL)),))
    await tab.open(f"{url(there)}/ui")
    await tab.until("document.querySelectorAll('#workers .worker').length === 4")
    await tab.until("document.querySelectorAll('#roles rect').length > 0")
    assert await tab.value("document.querySelectorAll('img').length") == 0
    assert await tab.value("document.title") == "Diptych" and tab.complaints == []
    assert EVIL in await tab.value("document.getElementById('workers').innerText")


async def test_a_flip_shows_in_the_picture_of_roles(tab: Page, there: Clients, dispatcher: FakeDispatcher) -> None:
    await tab.open(f"{url(there)}/ui")
    await tab.until("document.querySelectorAll('#roles rect.prefill').length === 1")
    prefill, decode = dispatcher.view.workers
    dispatcher.view = replace(dispatcher.view, workers=(structs.replace(prefill, role=Role.DECODE), decode))
    await tab.until("document.querySelectorAll('#roles rect.decode').length === 2")
    assert await tab.value("document.querySelectorAll('#roles rect.prefill').length") == 1, "the past stays"


async def test_the_chat_streams_and_remembers_the_conversation(tab: Page) -> None:
    dispatcher = FakeDispatcher(lambda request: b"first second", chunk=6, step_s=0.5)
    async with opened(dispatcher) as (there, _):
        await tab.open(f"{url(there)}/ui")
        await tab.until("!!document.querySelector('#workers .worker')")
        await tab.type("#prompt", "hello <b>you</b>")
        await tab.press_enter()
        await tab.until("document.querySelector('.assistant')?.innerText === 'first '")
        await tab.until("document.querySelector('.assistant small')?.innerText.includes('12 tokens')")
        assert await tab.value("document.querySelector('.assistant').firstChild.data") == "first second"
        assert await tab.value("document.querySelector('.user').innerText") == "hello <b>you</b>"
        await tab.type("#prompt", "again")
        await tab.press_enter()
        await tab.until("document.querySelectorAll('.assistant small').length === 2")
        assert bytes(dispatcher.requests[1].prompt) == b"<user>hello <b>you</b>\n<assistant>first second\n<user>again\n"
        assert tab.complaints == []


async def test_the_chat_shows_reasoning_apart_and_does_not_send_it_back(tab: Page) -> None:
    dispatcher = FakeDispatcher(lambda request: b"<think>hm, so</think>Yes", chunk=3, step_s=0.01)
    async with opened(dispatcher, ToolTokenizer) as (there, _):
        await tab.open(f"{url(there)}/ui")
        await tab.until("!!document.querySelector('#workers .worker')")
        for number, asked in enumerate(("hello", "again"), 1):
            await tab.type("#prompt", asked)
            await tab.press_enter()
            await tab.until(f"document.querySelectorAll('.assistant small').length === {number}")
            await tab.until("!document.getElementById('send').hidden")
        assert await tab.value("document.querySelector('.assistant .reasoning').innerText") == "hm, so"
        assert await tab.value("document.querySelector('.assistant').innerText.split('\\n')[1]") == "Yes"
        messages, _ = json.loads(bytes(dispatcher.requests[1].prompt))
        assert [each["content"] for each in messages] == ["hello", "Yes", "again"]


async def test_a_stopped_answer_is_cancelled_in_the_cluster(tab: Page) -> None:
    dispatcher = FakeDispatcher(step_s=0.05)
    async with opened(dispatcher) as (there, _):
        await tab.open(f"{url(there)}/ui")
        await tab.type("#prompt", "go on")
        await tab.press_enter()
        await tab.until("document.querySelector('.assistant')?.innerText.length > 3")
        assert len(dispatcher.running) == 1
        await tab.value("document.getElementById('stop').click()")
        await tab.until("document.querySelector('.failed')?.innerText === 'Stopped.'")
        await tab.until("!document.getElementById('send').hidden")
        async with asyncio.timeout(WAIT_S):
            while dispatcher.running:
                await asyncio.sleep(LOOK_S)


async def test_the_page_shows_the_servers_error(tab: Page, there: Clients) -> None:
    await tab.open(f"{url(there)}/ui")
    await tab.value("document.getElementById('most').value = '100000'")
    await tab.type("#prompt", "hello")
    await tab.press_enter()
    await tab.until("document.querySelector('.failed')?.innerText.includes('maximum context length is')")


async def test_the_page_sends_the_typed_key(tab: Page, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY}\n")
    async with opened(FakeDispatcher(), api_keys_file=str(tmp_path / "keys")) as (there, _):
        await tab.open(f"{url(there)}/ui")
        await tab.until("!document.getElementById('access').hidden")
        assert await tab.value("document.querySelectorAll('#workers .worker').length") == 0
        await tab.type("#key", "x" * 25)
        await tab.press_enter()
        await tab.until("document.getElementById('notice').innerText.includes('does not know this API key')")
        await tab.type("#key", KEY)
        await tab.press_enter()
        await tab.until("document.querySelectorAll('#workers .worker').length === 2")
        assert await tab.value("document.getElementById('access').hidden")
        assert all(KEY not in each for each in tab.requested), "a key stands in no address"
