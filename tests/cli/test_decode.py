"""`decode` knows each of HAMi's values by its form, and says so when it knows none."""

import io
import json

import pytest

from agent.cli.main import dispatch

REGISTER = '[{"id":"GPU-1","count":10,"devmem":81559,"devcore":100,"type":"NVIDIA H100"}]'
COLON = "GPU-1,10,81559,100,NVIDIA-Tesla P4,0,true:"
COLON_9 = "GPU-1,10,81559,100,NVIDIA H100,0,true,0,hami-core:"
DEVICES = "GPU-1,NVIDIA,4000,30:;;"
CONFIG = '{"nodeconfig":[{"name":"node-a","devicesplitcount":5}]}'
Out = pytest.CaptureFixture[str]


def decoded(capsys: Out, *words: str) -> dict:
    assert dispatch(["decode", *words], {}) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: Out, *words: str) -> str:
    assert dispatch(["decode", *words], {}) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (sentence,) = captured.err.splitlines()
    return sentence


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (REGISTER, "register"),
        (COLON, "register"),
        (COLON_9, "register"),
        (DEVICES, "devices"),
        ("GPU-1,NVIDIA,4000,30,more:", "devices"),
        (";GPU-1,NVIDIA,4000,30:;", "devices"),
        ("2026-08-21T10:00:00Z,team-a,train-0", "lock"),
        ("2026-08-21T10:00:00Z", "lock"),
        ("Requesting_2026-08-21 10:00:00", "handshake"),
        ("Reported 2026-08-21 10:00:00.123 +0000 UTC m=+1", "handshake"),
        (CONFIG, "nodeconfig"),
        ('{"other":1,"NodeConfig":[]}', "nodeconfig"),
    ],
)
def test_each_value_is_known_by_its_form(text: str, kind: str, capsys: Out) -> None:
    assert decoded(capsys, text) == decoded(capsys, "--kind", kind, text)
    assert decoded(capsys, text)["kind"] == kind


def test_both_forms_of_the_register_annotation_say_the_same(capsys: Out) -> None:
    of_json = REGISTER.replace("NVIDIA H100", "NVIDIA-Tesla P4").replace(
        "}", ',"mode":"hami-core","health":true}'
    )

    assert decoded(capsys, of_json) == decoded(capsys, COLON)


def test_a_handshake_is_a_word_and_a_time(capsys: Out) -> None:
    found = decoded(capsys, "Deleted_2026-08-21 10:00:00")

    assert found["data"] == {"word": "Deleted", "time": "2026-08-21T10:00:00"}


def test_a_nodeconfig_keeps_the_keys_of_its_file(capsys: Out) -> None:
    assert decoded(capsys, CONFIG)["data"] == [{"name": "node-a", "devicesplitcount": 5}]


def test_a_value_is_read_from_stdin_too(capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{COLON}\n"))

    assert decoded(capsys)["kind"] == "register"


@pytest.mark.parametrize(
    "text", ["garbage", ":", '{"x', '{"a":1}', "a,b", "a,b,c:", "2026", "NULL", "{}"]
)
def test_a_text_of_no_known_form_is_refused_with_the_forms(text: str, capsys: Out) -> None:
    sentence = refused(capsys, text)

    for form in ("register annotation", "devices", "node lock", "handshake", "nodeconfig"):
        assert form in sentence


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("devices", "garbage", "names no GPU"),
        ("devices", ":", "names no GPU"),
        ("devices", ";;", "names no GPU"),
        ("devices", "a,b,c", "3 of 4 fields"),
        ("register", "[{}]", "GPU 0 has no id"),
        ("register", ",10,1,100,T,0,true:", "GPU 0 has no id"),
        ("register", "garbage", "has no `:`"),
        ("lock", "2026-08-21T10:00:00Z,a", "2 parts"),
        ("handshake", "garbage", "begins with none of"),
        ("nodeconfig", '{"nodeconfig":[{"name":1}]}', "name: text is expected, not `1`"),
    ],
)
def test_a_malformed_value_is_refused_with_its_mistake(
    kind: str, text: str, says: str, capsys: Out
) -> None:
    sentence = refused(capsys, "--kind", kind, text)

    assert f"not a valid {kind} value" in sentence
    assert says in sentence


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[", "register"),
        ("null", "register"),
        ("GPU-1,10,1,100,T,0,true,0:", "register"),
        ("GPU-1,NVIDIA,x,30:", "devices"),
        (";;", "devices"),
        (",:,;", "devices"),
        (",,0,0:;", "devices"),
        ("2026-13-21T10:00:00Z", "lock"),
        ('{"nodeconfig":[', "nodeconfig"),
    ],
)
def test_a_broken_value_of_a_known_form_is_refused_as_that(
    text: str, kind: str, capsys: Out
) -> None:
    assert f"not a valid {kind} value" in refused(capsys, text)
