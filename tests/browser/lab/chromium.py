"""Chromium without a window, driven by its DevTools protocol over one websocket."""

import asyncio
import contextlib
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

ANSWER: Final = 20.0
"""Seconds for one call."""
START: Final = 30.0
LOOK: Final = 0.05
NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
BETWEEN: Final = "Inspected target navigated"
"""Chromium's error where the document was left during the call."""
ARGUMENTS: Final = (
    "--headless=new",
    "--no-sandbox",  # as root, in a container, and for pages of this test alone
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
)


class DevToolsError(Exception):
    """Chromium answered a call with an error, or a script of the test failed."""


def found() -> str | None:
    """The path of a browser; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@dataclass(eq=False)
class Tab:
    """One tab. `errors`: what its console said of errors, violations of a policy included."""

    socket: aiohttp.ClientWebSocketResponse
    errors: list[str] = field(default_factory=list)
    waiting: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)
    numbers: Any = field(default_factory=lambda: itertools.count(1))

    async def read(self) -> None:
        """Take answers and events until the browser ends."""
        async for message in self.socket:
            said = json.loads(message.data)
            if "id" in said:
                self.waiting.pop(said["id"]).set_result(said)
            else:
                self._hear(said["method"], said.get("params", {}))

    def _hear(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in {"error", "warning", "assert"}:
                self.errors.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in {"error", "warning"}:
                self.errors.append(json.dumps(params["entry"]))

    async def call(self, method: str, **params: object) -> dict[str, Any]:
        """One call of the protocol. Raises DevToolsError, TimeoutError."""
        number = next(self.numbers)
        answer = self.waiting[number] = asyncio.get_running_loop().create_future()
        await self.socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(ANSWER):
            said = await answer
        if "error" in said:
            raise DevToolsError(f"{method}: {said['error']}")
        result: dict[str, Any] = said["result"]
        return result

    async def go(self, address: str) -> None:
        """Open an address and wait until the page is loaded."""
        await self.call("Page.navigate", url=address)
        assert await self.until(
            "document.readyState === 'complete' && location.href !== 'about:blank'"
        )

    async def evaluate(self, script: str) -> Any:
        """The value of an expression, of its promise if it is one. Raises DevToolsError."""
        said = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in said:
            raise DevToolsError(json.dumps(said["exceptionDetails"]))
        return said["result"].get("value")

    async def until(self, script: str, within: float = ANSWER) -> bool:
        """Whether the expression comes true in time. Between two documents it is not true."""
        end = asyncio.get_running_loop().time() + within
        while asyncio.get_running_loop().time() < end:
            try:
                if await self.evaluate(f"Boolean({script})"):
                    return True
            except DevToolsError as error:
                if BETWEEN not in str(error):
                    raise
            await asyncio.sleep(LOOK)
        return False

    async def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key, such as Tab (9)."""
        one = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.call(
            "Input.dispatchKeyEvent", type="keyDown", **one, **({"text": text} if text else {})
        )
        await self.call("Input.dispatchKeyEvent", type="keyUp", **one)

    async def write(self, text: str) -> None:
        """Type a text where the focus is."""
        await self.call("Input.insertText", text=text)

    async def look(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Give the window a size and the reader a preference; nothing moves smoothly."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        still = {"name": "prefers-reduced-motion", "value": "reduce"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme, still])


@dataclass(eq=False, slots=True)
class Chromium:
    """A running browser. `address`: of its websocket."""

    client: aiohttp.ClientSession
    address: str

    @contextlib.asynccontextmanager
    async def tab(self) -> AsyncIterator[Tab]:
        """An empty tab, closed at the end."""
        async with self._joined(self.address) as whole:
            made = await whole.call("Target.createTarget", url="about:blank")
            target = made["targetId"]
            base = self.address.partition("/devtools/")[0]
            async with self._joined(f"{base}/devtools/page/{target}") as tab:
                for domain in ("Page", "Runtime", "Log"):
                    await tab.call(f"{domain}.enable")
                await tab.look()
                yield tab
            await whole.call("Target.closeTarget", targetId=target)

    @contextlib.asynccontextmanager
    async def _joined(self, address: str) -> AsyncIterator[Tab]:
        async with (
            self.client.ws_connect(address, max_msg_size=64 * 1024 * 1024) as socket,
            asyncio.TaskGroup() as group,
        ):
            tab = Tab(socket)
            reading = group.create_task(tab.read())
            try:
                yield tab
            finally:
                reading.cancel()


@contextlib.asynccontextmanager
async def open_chromium(program: str) -> AsyncIterator[Chromium]:
    """A browser with a profile of its own. At the end, end it and remove the profile."""
    with tempfile.TemporaryDirectory(prefix="page-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program,
            *ARGUMENTS,
            f"--user-data-dir={profile}",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            address = await _address(Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as client:
                yield Chromium(client, address)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()


async def _address(port_file: Path) -> str:
    """The websocket's address, which the browser writes into its profile."""
    async with asyncio.timeout(START):
        while True:
            with contextlib.suppress(FileNotFoundError):
                written = await asyncio.to_thread(port_file.read_text)
                port, _, path = written.partition("\n")
                if path:
                    return f"ws://127.0.0.1:{port}{path}"
            await asyncio.sleep(LOOK)
