"""Pictures of the page for people: `make screenshots` writes them to build/screenshots."""

import asyncio
import sys
from pathlib import Path
from typing import Final

from agent.sandbox.lab.cluster import SandboxCluster
from tests.browser.lab.chromium import Tab, found, open_chromium
from tests.browser.lab.node import open_node, shows
from tests.browser.lab.serving import serving_page
from tests.doors.page_facts import busy

PLACE: Final = Path(__file__).parents[2] / "build" / "screenshots"
WIDTHS: Final = (390, 1280)


async def main() -> int:
    """Write a picture for each scene, width and scheme."""
    browser = found()
    if browser is None:
        sys.stderr.write("screenshots: there is no chromium\n")
        return 1
    PLACE.mkdir(parents=True, exist_ok=True)
    async with open_chromium(browser) as chromium, chromium.tab() as tab:
        async with open_node() as cluster:
            await _spoil(cluster)
            await _pictures(tab, "sandbox", cluster.web_address or "")
        async with serving_page(busy) as address:
            await _pictures(tab, "busy", address)
    return 0


async def _spoil(cluster: SandboxCluster) -> None:
    cluster.hardware.xid("1", 79)
    cluster.hardware.xid("3", 94)
    assert await shows(cluster, "H-079")
    assert await shows(cluster, "H-094")


async def _pictures(tab: Tab, scene: str, address: str) -> None:
    for width in WIDTHS:
        for dark in (False, True):
            await tab.look(width=width, dark=dark)
            await tab.go(address)
            assert await tab.until("document.getElementById('link').textContent === 'Live,'")
            name = f"{scene}-{width}-{'dark' if dark else 'light'}.png"
            (PLACE / name).write_bytes(await tab.screenshot())
            sys.stdout.write(f"{PLACE / name}\n")


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
