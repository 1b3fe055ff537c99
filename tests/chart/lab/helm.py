"""Helm, and the objects that the chart gives for values."""

import functools
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from tests.chart.lab.programs import Ended, ran

ROOT: Final = Path(__file__).resolve().parents[3]
CHART: Final = ROOT / "deploy" / "chart" / "hami-agent"
NEWEST: Final = "1.37"
NAMESPACE: Final = "gpu-system"

_NOTES: Final = """{{- dict "kind" "Notes" "text" (tpl (.Files.Get "notes") .) | toJson }}"""

Object = dict[str, Any]
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Helm:
    """The program, and a directory of its own. What was rendered once is not rendered again."""

    program: Path
    room: Path

    def lint(self, values: Values) -> str:
        """What it finds, of whatever weight. Empty if it finds nothing."""
        done = self._run("lint", str(CHART), *self._given(values), "--strict", "--quiet")
        return "" if done.returncode == 0 else done.stdout + done.stderr

    def refusal(self, values: Values) -> str:
        """Why nothing is rendered."""
        done = self._template(values, NEWEST, CHART)
        assert done.returncode, "these values are taken"
        return done.stderr

    def text(self, values: Values, kubernetes: str = NEWEST) -> str:
        """Everything as one file, as `kubectl apply` takes it."""
        return self._rendered(json.dumps(values), kubernetes, CHART)

    def everything(self, values: Values, kubernetes: str) -> Sequence[Object]:
        """The objects, and of kind Notes what an operator reads after the installation.

        Helm tells the notes of no other version than its own.
        """
        chart = self.room / "chart"
        if not chart.exists():
            shutil.copytree(CHART, chart)
            (chart / "templates" / "NOTES.txt").replace(chart / "notes")
            (chart / "templates" / "notes.yaml").write_text(_NOTES)
        return parsed(self._rendered(json.dumps(values), kubernetes, chart))

    def notes(self, values: Values, kubernetes: str) -> str:
        """What an operator reads after the installation."""
        notes: str = the(self.everything(values, kubernetes), "Notes")["text"]
        return notes

    def help(self, words: Sequence[str]) -> str:
        """What it says of a command. Raises AssertionError: it does not know the flags in it."""
        done = self._run(*words, "--help")
        assert done.returncode == 0, done.stderr
        return done.stdout

    def told(self, release: str, chart: Path, settings: Sequence[str]) -> Sequence[Object]:
        """The objects of a command that a document tells people to type."""
        given = (word for one in settings for word in ("--set", one))
        version = f"--kube-version={NEWEST}"
        done = self._run("template", release, str(chart), *given, version)
        assert done.returncode == 0, done.stderr
        return parsed(done.stdout)

    def objects(self, values: Values, kubernetes: str = NEWEST) -> Sequence[Object]:
        """The same, parsed."""
        return parsed(self.text(values, kubernetes))

    @functools.cache  # noqa: B019 -- one for the whole run
    def _rendered(self, values: str, kubernetes: str, chart: Path) -> str:
        done = self._template(json.loads(values), kubernetes, chart)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _template(self, values: Values, kubernetes: str, chart: Path) -> Ended:
        version = f"--kube-version={kubernetes}"
        return self._run("template", "agent", str(chart), *self._given(values), version)

    def _given(self, values: Values) -> Sequence[str]:
        file = self.room / "values.yaml"
        file.write_text(yaml.safe_dump(dict(values)))
        return (f"--namespace={NAMESPACE}", f"--values={file}")

    def _run(self, *arguments: str) -> Ended:
        room = {f"HELM_{name}_HOME": str(self.room) for name in ("CACHE", "CONFIG", "DATA")}
        environ = {**room, "KUBECONFIG": str(self.room / "none")}
        return ran(self.program, *arguments, environ=environ)


def parsed(text: str) -> Sequence[Object]:
    """The objects of a file of several."""
    return tuple(one for one in yaml.safe_load_all(text) if one)


def of_kind(objects: Sequence[Object], kind: str) -> Mapping[str, Object]:
    """Those of one kind, by name."""
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def the(objects: Sequence[Object], kind: str) -> Object:
    """The only one of its kind."""
    (only,) = (one for one in objects if one["kind"] == kind)
    return only


def pod_of(objects: Sequence[Object]) -> Object:
    """The agent's pod."""
    found: Object = the(objects, "DaemonSet")["spec"]["template"]["spec"]
    return found


def container(pod: Object, name: str = "agent") -> Object:
    """One container of a pod, init containers included. Raises KeyError: there is none."""
    present = {one["name"]: one for one in (*pod.get("initContainers", ()), *pod["containers"])}
    found: Object = present[name]
    return found


def host_paths(pod: Object) -> Mapping[str, str]:
    """The host's directories by the volume's name."""
    return {one["name"]: one["hostPath"]["path"] for one in pod["volumes"] if "hostPath" in one}
