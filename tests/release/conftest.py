"""A release that deploy/release has built, and its image as containers see it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.image.lab.bundle import Bundle, unpacked
from tests.marking import on_real_time
from tests.released import released

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real time: builders and containers are real processes."""
    on_real_time(items, HERE, 180)


@pytest.fixture(scope="session")
def release() -> Path:
    """The folder."""
    sums = released("SHA256SUMS")
    if sums is None:
        pytest.fail("there is no release: run make test-release", pytrace=False)
    return sums.parent


@pytest.fixture(scope="session")
def bundle(release: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    """Its image unpacked, ready for runc."""
    (archive,) = release.glob("*.oci.tar")
    with unpacked(archive, tmp_path_factory.mktemp("release")) as made:
        yield made
