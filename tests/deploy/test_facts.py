"""What `make facts` prints is what is so, and BENCHMARKS.md quotes it."""

import json
import re
from pathlib import Path

from deploy import facts

GAP = "rolling update: no slices for"


def weights(folder: Path, base: str, packed: int, unpacked: int) -> None:
    (folder / base).mkdir(parents=True)
    text = json.dumps({"packed": packed, "unpacked": unpacked})
    (folder / base / "facts.json").write_text(text)


def test_every_right_of_the_role_has_words_and_names_what_a_policy_lets_through():
    rights = {row[0].strip("`"): row[2] for row in facts.granted()}

    assert rights.keys() == set(facts.LEFT)
    assert "`hami.io/node-nvidia-register`" in rights["nodes"]
    assert "below `hami-agent/`" in rights["nodes"]
    assert rights["nodes"].endswith("`hami.io/mutex.lock` (removal)")


def test_what_was_not_measured_is_named_with_its_command(tmp_path):
    found = (*facts.images(tmp_path), *facts.times(tmp_path))
    said = facts.text(found, ())

    assert not any(one.wrong for one in found)
    assert ["make image", "make image", "make test-systemd", "make test-peers"] == re.findall(
        r"^Not measured here: .* Run `(.*)`\.$", said, re.MULTILINE
    )


def test_an_image_beyond_its_bound_is_wrong(tmp_path):
    weights(tmp_path, "small", 20_000_000, 91_000_000)
    weights(tmp_path, "slim", 60_000_000, 300_000_000)

    small, slim = facts.images(tmp_path)

    assert ("20 MB / 91 MB", "35 MB / 90 MB", True) == (small.found, small.bound, small.wrong)
    assert ("60 MB / 300 MB", "120 MB / any", False) == (slim.found, slim.bound, slim.wrong)


def test_a_time_over_its_bound_is_told_and_is_not_wrong(tmp_path):
    row = {"what": GAP, "measured": 1.234, "bound": 1.0, "unit": "s"}
    (tmp_path / "peers.json").write_text(json.dumps([row, row | {"what": "other"}]))

    _, gap = facts.times(tmp_path)

    assert facts.Fact(GAP, "1.23 s (over)", "1 s") == gap


def test_a_file_that_is_none_is_an_error_that_names_no_traceback(tmp_path, capsys):
    (tmp_path / "peers.json").write_text("{")

    assert 1 == facts.main(tmp_path)

    assert capsys.readouterr().err.startswith("facts: ")
