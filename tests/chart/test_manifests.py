"""What is rendered from the chart and lies in the repository is what the chart gives now."""

from deploy import render
from tests.chart.lab.helm import ROOT


def test_the_plain_manifests_are_in_step(programs, tmp_path):
    render.main(str(programs / "helm"), tmp_path)
    rendered = {
        path.relative_to(tmp_path): path.read_text()
        for path in tmp_path.rglob("*")
        if path.is_file()
    }
    present = {
        path.relative_to(ROOT): path.read_text()
        for path in (*(ROOT / render.MANIFESTS).iterdir(), ROOT / render.SCHEMA)
    }

    assert rendered == present, "run make manifests"
