"""HAMi's files as an operator brings them: what has another effect than there is told."""

import json

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
