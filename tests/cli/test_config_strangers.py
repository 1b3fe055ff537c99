"""Files that are none of the three: one sentence says what each is, and what to give instead."""

import json
from pathlib import Path

import pytest
import yaml

from agent.cli.main import dispatch
from tests.cli.config_files import checked, written

CONFIG_JSON = '{"nodeconfig": [{"name": "a", "devicesplitcount": 5}]}'
DEVICE_CONFIG = "nvidia:\n  deviceSplitCount: 4\n"
SCHEDULER = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n"
EXPECTED = "expected the agent's config.yaml, or HAMi's device-config.yaml"


def a_config_map(**data: str) -> dict[str, object]:
    """As `kubectl get configmap` prints it."""
    metadata = {"name": "hami-device", "namespace": "gpu"}
    return {"apiVersion": "v1", "data": data, "kind": "ConfigMap", "metadata": metadata}


def refused(capsys, *words: str) -> str:
    """The one sentence."""
    out, err = checked(capsys, *words, code=1)
    assert "" == out
    (sentence,) = err.splitlines()
    return sentence


@pytest.mark.parametrize(
    ("name", "dump"),
    [
        ("cm.yaml", json.dumps),
        ("cm.yaml", yaml.safe_dump),
        ("cm.json", json.dumps),
        ("cm", json.dumps),
        ("cm", yaml.safe_dump),
    ],
)
@pytest.mark.parametrize(
    ("key", "text"), [("device-config.yaml", DEVICE_CONFIG), ("config.json", CONFIG_JSON)]
)
def test_a_whole_configmap_is_told_which_key_to_give(
    tmp_path, capsys, name: str, dump, key: str, text: str
):
    file = tmp_path / name
    file.write_text(dump(a_config_map(**{"other": "x", key: text})))

    sentence = refused(capsys, str(file))

    escaped = key.replace(".", "\\.")
    assert sentence == (
        f"hami-agent: {file}:1:1: this is the whole ConfigMap hami-device; give the file below its "
        f"key {key}: kubectl get configmap hami-device --namespace gpu --output "
        f"jsonpath='{{.data.{escaped}}}' | hami-agent config check -"
    )


@pytest.mark.parametrize("flag", ["--config", "--device-config", "--nodeconfig"])
def test_no_verb_takes_a_whole_configmap(tmp_path, capsys, flag: str):
    file = tmp_path / "cm.json"
    file.write_text(json.dumps(a_config_map(**{"config.json": CONFIG_JSON})))

    assert 78 == dispatch(["config", "show", flag, str(file)], {})
    assert "this is the whole ConfigMap hami-device; give the file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            yaml.safe_dump(a_config_map(**{"config.yaml": SCHEDULER})),
            "this is the whole ConfigMap hami-device, which contains no settings file",
        ),
        ("kind: ConfigMap\napiVersion: v1\n", "this is the whole ConfigMap NAME, which"),
        ("kind: ConfigMap\napiVersion: v1\ndata: [a]\n", "this is the whole ConfigMap NAME, which"),
        (SCHEDULER, "this is a Kubernetes object of kind KubeSchedulerConfiguration, not"),
        ('{"kind": "Policy", "apiVersion": "v1"}', "this is a Kubernetes object of kind Policy"),
        (
            "apiVersion: v1\nkind: List\nitems: []\n",
            "this is a Kubernetes object of kind List, not a settings file; give the file in",
        ),
        (
            "resourceName: x\nresourceMem: y\nscheduler: {a: 1}\ndevicePlugin: {b: 1}\n",
            "these are values of a Helm chart",
        ),
        (
            "version: v1\nflags: {migStrategy: none}\nsharing: {timeSlicing: {}}\n",
            "this is a configuration of NVIDIA's device plugin",
        ),
        (
            "version: v1\nsharing: {timeSlicing: {resources: []}}\n",
            "this is a configuration of NVIDIA's device plugin",
        ),
        ("version: v1\nsharing: {splitCount: 4}\n", "unknown setting version"),
        ("Nvidia: {deviceSplitCount: 4}\n", "this looks like HAMi's device-config.yaml; its"),
        ("/usr/local/vgpu/libvgpu.so\n", "keys and values are expected here, not `/usr/local"),
        ("- a\n", f"keys and values are expected here, not a list; {EXPECTED}"),
        ("nodeconfig:\n- name: a\n", "this is HAMi's config.json: name it with --nodeconfig"),
    ],
)
def test_another_file_is_told_by_what_it_is(tmp_path, monkeypatch, capsys, text: str, says: str):
    (file,) = written(tmp_path, monkeypatch, **{"f.yaml": text})

    assert refused(capsys, file).startswith(f"hami-agent: {file}:1:1: {says}")


@pytest.mark.parametrize(
    ("text", "says"),
    [(DEVICE_CONFIG, "name it with --device-config"), (CONFIG_JSON, "name it with --nodeconfig")],
)
def test_hamis_files_in_the_place_of_the_own_one_are_told_their_place(
    tmp_path, capsys, text: str, says: str
):
    file = tmp_path / "config.yaml"
    file.write_text(text)

    assert 78 == dispatch(["run", "--config", str(file), "--state-dir", str(tmp_path)], {})
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("name", ["own.json", "own.yaml", "own"])
def test_the_agents_own_file_may_be_json(tmp_path, monkeypatch, capsys, name: str):
    (file,) = written(tmp_path, monkeypatch, **{name: '{"sharing": {"splitCount": 4}}'})

    out, err = checked(capsys, file, "--node", "n")

    assert ("", f"  sharing.splitCount  4      {file}:1:28") == (err, out.splitlines()[1])


def test_hamis_yaml_in_braces_is_hamis_yaml(tmp_path, monkeypatch, capsys):
    (file,) = written(tmp_path, monkeypatch, **{"d.yaml": "{nvidia: {deviceSplitCount: 4}}"})

    assert "  sharing.splitCount  4      d.yaml:1:29" in checked(capsys, file)[0].splitlines()


def test_a_dash_is_standard_input(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("in").write_text(DEVICE_CONFIG)
    monkeypatch.setattr("agent.cli.config_check.STDIN", Path("in"))

    assert "  sharing.splitCount  4      in:2:21" in checked(capsys, "-")[0].splitlines()


def test_keys_that_are_like_none_get_no_far_fetched_hint(tmp_path, monkeypatch, capsys):
    (file,) = written(tmp_path, monkeypatch, **{"c.yaml": "leaderElection: {}\nsplitCount: 4\n"})

    first, second = checked(capsys, file, code=1)[1].splitlines()

    assert first.endswith("unknown setting leaderElection; `hami-agent config show` lists all")
    assert second.endswith("unknown setting splitCount; did you mean sharing.splitCount?")


def test_hamis_device_config_without_its_section_nvidia_is_told_as_what_it_is(tmp_path, capsys):
    file = tmp_path / "device-config.yaml"
    file.write_text("cambricon:\n  resourceCountName: cambricon.com/vmlu\n")

    sentence = refused(capsys, str(file))

    assert (
        "this looks like HAMi's device-config.yaml, and its section `nvidia` is missing" in sentence
    )
    assert "--device-config" in sentence


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("sharing:\n  splitCount: {{ .Values.n }}\n", "2:16"),
        ("{{- if .Values.n }}\nsharing: {}\n{{- end }}\n", "1:2"),
        ('metadata:\n  labels:\n    {{- include "x" . | nindent 4 }}\ndata: 3\n', "3:6"),
    ],
)
def test_a_template_is_told_to_be_one(tmp_path, monkeypatch, capsys, text: str, place: str):
    files = written(tmp_path, monkeypatch, **{"t.yaml": text})

    assert refused(capsys, *files).startswith(
        f"hami-agent: t.yaml:{place}: this is a template that was not rendered; give the "
    )


def test_braces_within_braces_that_are_no_template_are_read(tmp_path, monkeypatch, capsys):
    files = written(tmp_path, monkeypatch, **{"c.yaml": "{sharing: {splitCount: 3}}  # {{ x }}\n"})

    assert "  sharing.splitCount  3      c.yaml:1:24" in checked(capsys, *files)[0].splitlines()


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_file_is_told_for_what_fed_it_may_have_failed(
    tmp_path, monkeypatch, capsys, text: str
):
    files = written(tmp_path, monkeypatch, **{"c.yaml": text})

    assert "hami-agent: warning: c.yaml: is empty; nothing is taken\n" == checked(capsys, *files)[1]
