#!/usr/bin/env python3
"""Renders what follows from the chart and from the agent's settings.

    deploy/render.py [HELM [FOLDER]]

Written to FOLDER (this repository): the part of the chart's value schema that describes `config`,
and with HELM, which is the program, the plain manifests.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from agent.settings.schema import json_schema

ROOT: Final = Path(__file__).resolve().parents[1]
CHART: Final = Path("deploy/chart/hami-agent")
MANIFESTS: Final = Path("deploy/manifests")
SCHEMA: Final = CHART / "values.schema.json"
RENDERED: Final = ("admission", "config", "daemonset", "networkpolicy", "rbac", "service")
KUBERNETES: Final = "1.30"
"""The oldest that takes all of it."""
HELMS_OWN: Final = re.compile(r"(?m)^ *(helm\.sh/chart|app\.kubernetes\.io/managed-by): .*\n")
SOURCE: Final = re.compile(r"(?m)^---\n# Source: .*\n")
HEAD: Final = "# Rendered from deploy/chart by `make manifests`.\n"
CHARTS_OWN: Final = ("files", "node", "observe", "paths", "web")
"""Sections of the settings that follow from the pod's mounts, ports and environment."""


def main(helm: str | None, root: Path) -> None:
    """Write below `root` all that can be written without Helm, or with it."""
    schema = (root if (root / SCHEMA).is_file() else ROOT) / SCHEMA
    (root / SCHEMA).parent.mkdir(parents=True, exist_ok=True)
    (root / SCHEMA).write_text(with_settings(schema.read_text(encoding="utf-8")), encoding="utf-8")
    if helm is None:
        return
    (root / MANIFESTS).mkdir(parents=True, exist_ok=True)
    for name in RENDERED:
        (root / MANIFESTS / f"{name}.yaml").write_text(manifest(helm, name), encoding="utf-8")


def manifest(helm: str, name: str) -> str:
    """One template with the default values, as a file that needs no Helm."""
    command = (helm, "template", "hami-agent", str(ROOT / CHART), "--namespace=kube-system")
    options = (
        f"--kube-version={KUBERNETES}",
        f"--show-only=templates/{name}.yaml",
        "--set=image.repository=hami-agent",
    )
    done = subprocess.run([*command, *options], check=True, capture_output=True, text=True)  # noqa: S603 -- the program is an argument of ours
    documents = [HELMS_OWN.sub("", part) for part in SOURCE.split(done.stdout) if part.strip()]
    return HEAD + "---\n".join(documents)


def with_settings(text: str) -> str:
    """The schema of the values with the agent's settings as they are now."""
    schema = json.loads(text)
    schema["$defs"]["settings"] = settings_schema()
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def settings_schema() -> dict[str, object]:
    """What `config` may hold: no setting that the chart itself has to know."""
    whole = {key: value for key, value in json_schema().items() if key not in {"$schema", "title"}}
    properties = dict(mapping(whole["properties"]))
    for section in CHARTS_OWN:
        del properties[section]
    properties["sharing"] = with_texts(mapping(properties["sharing"]))
    properties["profiles"] = of_items(mapping(properties["profiles"]), "sharing")
    library = dict(mapping(properties["library"]))
    library["properties"] = dict(without(mapping(library["properties"]), "hookPath"))
    properties["library"] = library
    return {**whole, "type": "object", "properties": properties}


def with_texts(section: Mapping[str, object]) -> Mapping[str, object]:
    """Numbers may be texts, too: helm's --set gives a fraction as one.

    The templates check both, and refuse one beyond the bounds in a sentence, which a schema cannot.
    """
    bounds = {"minimum", "maximum"}
    leaves = {key: mapping(leaf) for key, leaf in mapping(section["properties"]).items()}
    taken = {
        key: {
            name: ["number", "string"] if name == "type" else value
            for name, value in leaf.items()
            if name not in bounds
        }
        if leaf.get("type") == "number"
        else leaf
        for key, leaf in leaves.items()
    }
    return {**section, "properties": taken}


def of_items(profiles: Mapping[str, object], name: str) -> Mapping[str, object]:
    """A list of objects, in which that section may have texts for numbers."""
    items = mapping(profiles["items"])
    properties = mapping(items["properties"])
    taken = {**properties, name: with_texts(mapping(properties[name]))}
    return {**profiles, "items": {**items, "properties": taken}}


def mapping(value: object) -> Mapping[str, object]:
    """The same, known to be a mapping. Raises TypeError."""
    if not isinstance(value, Mapping):
        raise TypeError(type(value).__name__)
    return value


def without(found: Mapping[str, object], left_out: str) -> Iterator[tuple[str, object]]:
    """All but one."""
    return ((key, value) for key, value in found.items() if key != left_out)


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else None, Path(sys.argv[2]) if sys.argv[2:] else ROOT)
