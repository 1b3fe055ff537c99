"""The programs that judge the chart."""

import os
from pathlib import Path

import pytest

from tests.chart.lab.helm import Helm
from tests.marking import on_real_time

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real time: the programs are real processes."""
    on_real_time(items, HERE, 60)


@pytest.fixture(scope="session")
def programs() -> Path:
    """The folder of what tests/chart/build made."""
    folder = os.environ.get("HAMI_CHART_TOOLS")  # noqa: TID251 -- said by tests/chart/run
    if folder is None:
        pytest.fail("there is no helm to test with: run make chart-check", pytrace=False)
    return Path(folder)


@pytest.fixture(scope="session")
def helm(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm, with a directory of its own."""
    return Helm(programs / "helm", tmp_path_factory.mktemp("helm"))
