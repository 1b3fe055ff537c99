"""The images that deploy/image/build made; every test sees each of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.image.lab.archive import ImageArchive, opened
from tests.image.lab.bundle import Bundle, unpacked
from tests.marking import on_real_time

HERE = Path(__file__).parent
BUILT = HERE.parents[1] / "build" / "image"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real time: containers are real processes."""
    on_real_time(items, HERE, 120)


@pytest.fixture(scope="session", params=["small", "slim"])
def base(request: pytest.FixtureRequest) -> str:
    """The base that the image stands on."""
    name = request.param
    if not (BUILT / name / "facts.json").exists():
        pytest.fail(f"there is no image on the {name} base: run make test-image", pytrace=False)
    return str(name)


@pytest.fixture(scope="session")
def facts(base: str) -> dict[str, object]:
    """What was measured when it was built."""
    measured: dict[str, object] = json.loads((BUILT / base / "facts.json").read_text())
    return measured


@pytest.fixture(scope="session")
def image(base: str) -> ImageArchive:
    """What the archive says."""
    return opened(BUILT / base / "hami-agent.oci.tar")


@pytest.fixture(scope="session")
def contents(base: str) -> dict[str, str]:
    """What the list of contents (SBOM) says of the agent's own packages: names and versions."""
    document = json.loads((BUILT / base / "sbom.cdx.json").read_text())
    return {
        part["name"].lower().replace("_", "-"): part["version"]
        for part in document["components"]
        if part.get("purl", "").startswith("pkg:pypi/") and _is_ours(part)
    }


def _is_ours(part: dict[str, Any]) -> bool:
    places = [one["value"] for one in part["properties"] if one["name"].endswith(":path")]
    return any(place.startswith("/opt/hami-agent/") for place in places)


@pytest.fixture(scope="session")
def bundle(base: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    """The image unpacked, ready for runc."""
    with unpacked(BUILT / base / "hami-agent.oci.tar", tmp_path_factory.mktemp(base)) as made:
        yield made
