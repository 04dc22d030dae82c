"""A headless Chromium, driven over its DevTools protocol: pages, what they say on their console, and what they load."""

import asyncio
import base64
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
WAIT_S, LOOK_S = 30.0, 0.02
# No sandbox: root has none. It resolves no name and asks no proxy: nothing leaves this machine.
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--no-default-browser-check", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-proxy-server", "--remote-debugging-port=0"),
)
NOWHERE = "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"


def installed() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def browser(folder: Path) -> Iterator[str]:
    """Its DevTools address. The whole process group is killed at the end."""
    program = installed()
    assert program is not None, "Chromium is there"
    command = [program, *OPTIONS, NOWHERE, f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("DevTools listening on "):
                yield line.split()[-1]
                return
        raise AssertionError(f"Chromium did not start: {''.join(said)[-2000:]}")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass
class Page:
    """A tab of its own, with no storage of others. `complaints`: errors and warnings, refused loads among them."""

    socket: aiohttp.ClientWebSocketResponse
    session: str = ""
    complaints: list[str] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)
    _answers: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    _number: int = 0

    async def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        where = {"sessionId": self.session} if self.session else {}
        await self.socket.send_json({"id": self._number, "method": method, "params": parameters} | where)
        return await asyncio.wait_for(answer, WAIT_S)

    async def listen(self) -> None:
        async for message in self.socket:
            received = message.json()
            if "id" in received:
                answer = self._answers.pop(received["id"])
                if "error" in received:
                    answer.set_exception(AssertionError(received["error"]["message"]))
                else:
                    answer.set_result(received["result"])
            else:
                self._heard(received["method"], received["params"])

    def _heard(self, method: str, received: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(received["exceptionDetails"]))
        elif method == "Log.entryAdded" and received["entry"]["level"] in ("error", "warning"):
            self.complaints.append(received["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requested.append(received["request"]["url"])

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("location.href !== 'about:blank' && document.readyState === 'complete'")

    async def value(self, expression: str) -> Any:
        """Of a JavaScript expression in the page."""
        received = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in received, received["exceptionDetails"]
        return received["result"].get("value")

    async def until(self, expression: str) -> Any:
        """The first value of this expression that is true."""
        try:
            async with asyncio.timeout(WAIT_S):
                while not (value := await self.value(expression)):
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            body = await self.value("document.body.innerText")
            raise AssertionError(f"never: {expression}\n{body}\n{self.complaints}") from None
        return value

    async def type(self, selector: str, words: str) -> None:
        await self.value(f"document.querySelector({selector!r}).focus()")
        await self.call("Input.insertText", text=words)

    async def press_enter(self) -> None:
        key = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **key)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **key)

    async def screenshot(self, *, dark: bool = False, width: int = 1280, height: int = 860) -> bytes:
        """A PNG."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=scheme)
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await asyncio.sleep(1.2)  # the picture of roles is drawn at the new width
        received = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(received["data"])


@asynccontextmanager
async def page(address: str) -> AsyncIterator[Page]:
    async with aiohttp.ClientSession() as client, client.ws_connect(address, max_msg_size=0) as socket:
        made = Page(socket)
        listening = asyncio.create_task(made.listen())
        try:
            context = (await made.call("Target.createBrowserContext"))["browserContextId"]
            target = await made.call("Target.createTarget", url="about:blank", browserContextId=context)
            attached = await made.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
            made.session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                await made.call(f"{domain}.enable")
            yield made
        finally:
            listening.cancel()
