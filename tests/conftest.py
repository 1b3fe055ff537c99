"""What holds for every test."""

import asyncio
import gc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent
ASKED = ("browser", "chart", "hostile", "image", "peers", "prometheus", "release", "systemd")
OPTIONS = {folder: f"--{folder}" for folder in ASKED}
"""Folders whose tests run only for those who ask, with the option that asks for them."""
MODELS = ("test_apiserver.py", "test_kubelet_*.py", "test_witness.py")
"""Modules of tests/peers whose tests are tried on a model, too: that always runs."""

# On Python 3.11 pytest-asyncio asks for "the current loop" before its first test; asyncio then
# makes one that nobody closes, and its ResourceWarning fails whatever test runs later.
asyncio.set_event_loop(None)

# The tests themselves are a million objects, and stay: they are looked through less often.
gc.set_threshold(50_000)

# Whether a property holds is no question of time. In CI hypothesis has a profile of its own, which
# plays the same examples each time: that stays. `make test-long` plays many more.
for _profile, _examples in (("unhurried", 50), ("night", 2000)):
    settings.register_profile(
        _profile,
        settings.get_profile(settings.get_current_profile_name()),
        deadline=None,
        max_examples=_examples,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("unhurried")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`tests/FOLDER/run` sees to it that there is what they need."""
    for folder, option in OPTIONS.items():
        parser.addoption(option, action="store_true", help=f"collect tests/{folder}/test_*.py too")
    parser.addoption("--hostile-files", default="200000", metavar="N", help="a pod leaves so many")
    parser.addoption("--gpu-watch", default="5", metavar="SECONDS", help="watch a real GPU so long")
    parser.addoption("--histories", default="10000", metavar="N", help="play so many, with -m it")
    parser.addoption("--history-seed", metavar="SEED", help="begin with the histories of that seed")
    parser.addoption("--history-jobs", metavar="N", help="play on so many processors (all)")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Workers (`-n`) get directories with short names: a socket's path ends after 107 bytes."""
    if hasattr(config, "workerinput"):
        base = Path(config.option.basetemp)
        config.option.basetemp = base.with_name(config.workerinput["workerid"])


def pytest_collection(session: pytest.Session) -> None:
    """Virtual time moves as soon as nothing can run; by default a loop looks 42 times before."""
    session.add_marker(pytest.mark.looptime(noop_cycles=0))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests of real peers, systemd or image are for those who ask; all others run always."""
    option = OPTIONS.get(collection_path.parent.name)
    if collection_path.parent.parent == TESTS and option and collection_path.match("test_*.py"):
        of_model = option == "--peers" and any(map(collection_path.match, MODELS))
        return not (of_model or config.getoption(option)) or None
    return None
