"""Promtool takes the rules, and every alert fires in its situation and in no other."""

import json
import re
import shutil

from tests.prometheus.lab.expressions import RULES, alerts
from tests.prometheus.lab.server import promtool
from tests.prometheus.lab.situations import SITUATIONS, promtools_test
from tests.shape import tree


def test_promtool_takes_the_rules():
    done = promtool("check", "rules", str(RULES))

    assert (0, "") == (done.returncode, done.stderr)
    assert f"SUCCESS: {len(alerts())} rules found" in done.stdout


def test_promtool_takes_the_documented_configuration(tmp_path):
    (block,) = re.findall(r"^```yml\n(.*?)^```", tree.text("GUIDE.md"), re.MULTILINE | re.DOTALL)
    (tmp_path / "prometheus.yml").write_text(block)
    shutil.copy(RULES, tmp_path)
    done = promtool("check", "config", str(tmp_path / "prometheus.yml"))

    assert (0, "") == (done.returncode, done.stderr)
    assert f"SUCCESS: {len(alerts())} rules found" in done.stdout
    assert "job_name: hami-agent" in block
    assert "honor_labels: true" in block


def test_every_alert_fires_in_its_situation_and_in_no_other(tmp_path):
    file = tmp_path / "situations.yaml"
    tests = [promtools_test(name) for name in SITUATIONS]
    file.write_text(json.dumps({"rule_files": [str(RULES)], "tests": tests}))
    done = promtool("test", "rules", str(file))

    assert 0 == done.returncode, done.stdout + done.stderr
    told = {word for situation in SITUATIONS.values() for word in situation.split()[:1]}
    assert {rule["alert"] for rule in alerts()} == told - {"|"}
