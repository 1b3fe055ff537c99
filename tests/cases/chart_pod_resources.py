"""A kubelet with another --root-dir moves pod-resources and leaves device-plugins where it is.

The chart derived the first from the second and had no value for it.
"""

import re

from tests.cases.box import verdict
from tests.process.agent_process import ROOT

CHART = ROOT / "deploy/chart/hami-agent"
values = (CHART / "values.yaml").read_text()
for line in (CHART / "templates/daemonset.yaml").read_text().splitlines():
    if "pod-resources" in line:
        print(line.strip())
verdict(
    right=bool(re.search(r"^\s*pod-?resources\w*:", values, re.MULTILINE | re.IGNORECASE)),
    wrong="no value names the directory of pod-resources",
)
