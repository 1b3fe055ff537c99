"""A chart in the place of HAMi's: of all its values the one that switches the device plugin off."""

import json
from pathlib import Path
from typing import Final

from tests.peers.lab.api import Object

_CHART: Final = {"apiVersion": "v2", "name": "hami", "version": "2.10.0"}


def write_hami_chart(folder: Path, plugin: Object) -> None:
    """Write it; `plugin` is the DaemonSet of HAMi's plugin. Raises OSError."""
    templates = folder / "templates"
    templates.mkdir(parents=True)
    (folder / "Chart.yaml").write_text(json.dumps(_CHART))
    (folder / "values.yaml").write_text(json.dumps({"devicePlugin": {"enabled": True}}))
    manifest = json.dumps({"apiVersion": "apps/v1", "kind": "DaemonSet", **plugin}, indent=1)
    text = f"{{{{- if .Values.devicePlugin.enabled }}}}\n{manifest}\n{{{{- end }}}}\n"
    (templates / "daemonset.yaml").write_text(text)
