"""kubernetes_asyncio is loaded lazily, and plainly where that does not work."""

import importlib.metadata
import subprocess
import sys

import pytest

from agent.kube import client as shim

COUNT = """
import sys
from agent.kube import client as shim
{before}
library = shim.load()
assert shim.load() == library
configuration = library.configuration()
assert configuration.connection_pool_maxsize == 100
assert library.rest_client.__module__ == "kubernetes_asyncio.client.rest"
print(len([name for name in sys.modules if name.startswith("kubernetes_asyncio")]))
"""


def loaded(before: str) -> int:
    """How many modules of the library a fresh process loads."""
    done = subprocess.run(  # noqa: S603 -- our own interpreter and text
        [sys.executable, "-c", COUNT.format(before=before)],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout.splitlines()[-1])


@pytest.mark.process
@pytest.mark.timeout(60)
def test_a_lazy_load_takes_a_handful_of_modules_and_nothing_that_no_request_uses():
    assert "36" == importlib.metadata.version("kubernetes-asyncio").split(".")[0], "tried with it"
    unused = "print(sys.modules.keys() & {'dateutil', 'urllib3.util'})"
    done = subprocess.run(  # noqa: S603 -- our own interpreter and text
        [sys.executable, "-c", COUNT.format(before="") + unused],
        check=True,
        capture_output=True,
        text=True,
    )
    count, unused = done.stdout.splitlines()

    assert 20 > int(count)
    assert "set()" == unused


@pytest.mark.process
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "before",
    [
        pytest.param("shim.NAMES = {name: {} for name in shim.NAMES}", id="names moved"),
        pytest.param("import kubernetes_asyncio", id="loaded already"),
    ],
)
def test_where_lazy_loading_fails_the_whole_library_is_loaded(before: str):
    assert 800 < loaded(before)


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shim, "ROOT", "kubernetes_of_elsewhere")

    with pytest.raises(ImportError, match="kubernetes_of_elsewhere is not installed"):
        shim.load()


@pytest.mark.process
@pytest.mark.timeout(60)
def test_importing_the_adapter_loads_neither_library():
    code = "import sys, agent.kube.api; print('aiohttp' in sys.modules, len(sys.modules))"
    done = subprocess.run(  # noqa: S603 -- our own interpreter and text
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )

    assert "False" == done.stdout.split()[0]
