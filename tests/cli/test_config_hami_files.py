"""HAMi's files as an operator brings them: what has another effect than there is told."""

import json

import pytest

from agent.cli.main import dispatch
from tests.cli.config_files import checked, written

MIG = '{"nodeconfig": [\n{"name": "a", "operatingmode": "mig"}, {"name": "b"}]}'


def test_a_node_that_would_have_no_slices_is_no_good_one(tmp_path, monkeypatch, capsys):
    files = written(tmp_path, monkeypatch, **{"n.json": MIG})

    out, err = checked(capsys, *files, code=1)

    assert "" == out
    assert (
        "hami-agent: n.json:2:32: sharing.operatingMode: the agent does not share GPUs in mode mig "
        "yet: the node has no slices; set hami-core or mps, or run HAMi's plugin there\n"
    ) == err
    assert "b: all defaults" in checked(capsys, *files, "--node", "b")[0]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            '"migstrategy": "mixed"',
            "n.json:2:30: migstrategy 'mixed' has no effect: HAMi's plugin does not use it either",
        ),
        (
            '"enablegetpreferredallocation": false',
            "n.json:2:47: enablegetpreferredallocation false has no effect: the agent always tells",
        ),
        ('"migstrategy": "none"', ""),
        ('"enablegetpreferredallocation": true', ""),
    ],
)
def test_what_has_no_effect_in_hamis_json_is_told(tmp_path, monkeypatch, capsys, keys, says):
    text = f'{{"nodeconfig": [\n{{"name": "a", {keys}}}]}}'
    files = written(tmp_path, monkeypatch, **{"n.json": text})

    err = checked(capsys, *files)[1]
    assert err.startswith(f"hami-agent: warning: {says}" if says else "")
    assert bool(says) == len(err.splitlines())


def test_a_node_that_is_named_twice_is_told_with_both_places(tmp_path, monkeypatch, capsys):
    text = (
        '{"nodeconfig": [\n{"name": "a", "devicesplitcount": 3, "devicememoryscaling": 2},\n'
        '{"name": "a", "devicesplitcount": 4}]}'
    )
    files = written(tmp_path, monkeypatch, **{"n.json": text})

    out, err = checked(capsys, *files)

    assert "  sharing.splitCount     4      n.json:3:35" in out.splitlines()
    assert "  sharing.memoryScaling  2.0    n.json:2:61" in out.splitlines()
    assert (
        "hami-agent: warning: n.json:3:1: the name a is also at n.json:2:1; both entries "
        "apply, and this one wins where they differ, as in HAMi's plugin\n"
    ) == err


SELECTED = {
    "nodeconfig": [
        {"nodelabelselector": {"matchLabels": {"Pool": "x"}}, "devicesplitcount": 4},
        {"name": "*", "devicesplitcount": 3},
        {"name": "b", "operatingmode": "unknown"},
    ]
}


def test_what_selects_by_labels_needs_labels_and_that_is_told(tmp_path, monkeypatch, capsys):
    files = written(tmp_path, monkeypatch, **{"n.json": json.dumps(SELECTED)})
    row = "  sharing.splitCount  {}"

    out, err = checked(capsys, *files, "--node", "a")
    assert any(line.startswith(row.format(3)) for line in out.splitlines())
    assert "note: the profile at n.json:1:17 is left out: it needs labels" in err
    out, err = checked(capsys, *files, "--node", "a", "--label", "Pool=x")
    assert any(line.startswith(row.format(4)) for line in out.splitlines())
    assert "note" not in err
    assert "warning: n.json:1:164: sharing.operatingMode: expected one of" in err

    for asked in ((), ("--node", "b")):
        assert "n.json:1:164: sharing.operatingMode" in checked(capsys, *files, *asked, code=1)[1]

    flags = ("--nodeconfig", *files, "--device-config", "", "--node-name", "a")
    assert 0 == dispatch(["config", "show", "--diff", *flags], {})
    shown = capsys.readouterr()
    assert "note: what selects by labels is left out" in shown.err
    assert "sharing.splitCount" in shown.out


@pytest.mark.parametrize("nvidia", ["", "{deviceSplitCount: 5}"])
def test_a_section_of_ours_in_hamis_file_is_told(tmp_path, monkeypatch, capsys, nvidia: str):
    text = f"nvidia: {nvidia}\nmetax: {{resourceCountName: x}}\nsharing: {{splitCount: 3}}\n"
    files = written(tmp_path, monkeypatch, **{"d.yaml": text})

    said = checked(capsys, *files)[1].splitlines()

    assert said[-1] == (
        "hami-agent: warning: d.yaml:3:1: sharing has no effect in HAMi's file; it belongs in the "
        "agent's own config.yaml"
    )


@pytest.mark.parametrize(
    ("keys", "device_config", "says"),
    [
        (
            '"devicesplitcount": 0',
            "deviceSplitCount: 4",
            (
                "n.json:2:35: devicesplitcount 0 overrides nothing, as in HAMi's plugin: "
                "sharing.splitCount of all nodes is 4 (d.yaml:2:21)"
            ),
        ),
        (
            '"enablenumatopology": false',
            "enableNumaTopology: true",
            (
                "n.json:2:37: enablenumatopology false overrides nothing, as in HAMi's plugin: "
                "sharing.numaTopology of all nodes is true (d.yaml:2:23)"
            ),
        ),
        ('"enablenumatopology": false', "deviceSplitCount: 4", ""),
        ('"preconfigureddevicememory": 0, "operatingmode": ""', "deviceSplitCount: 4", ""),
    ],
)
def test_a_zero_that_overrides_nothing_is_told_where_something_else_holds(
    tmp_path, monkeypatch, capsys, keys, device_config, says
):
    files = written(
        tmp_path,
        monkeypatch,
        **{
            "d.yaml": f"nvidia:\n  {device_config}\n",
            "n.json": f'{{"nodeconfig": [\n{{"name": "a", {keys}}}]}}',
        },
    )

    err = checked(capsys, *files)[1]

    assert (f"hami-agent: warning: {says}\n" if says else "") == err
