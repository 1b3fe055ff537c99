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
    document: dict = json.loads(capsys.readouterr().out)
    assert document.pop("generatedAt")
    return document


def refused(capsys: Out, *words: str) -> str:
    assert dispatch(["decode", *words], {}) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (sentence,) = captured.err.splitlines()
    return sentence


ANY = object()
SHARES = [
    [{"uuid": "GPU-1", "type": kind, "memory_mib": 4000, "core_percent": 30}]
    for kind in ("NVIDIA", "MLU")
]


@pytest.mark.parametrize(
    ("text", "kind", "data"),
    [
        (REGISTER, "register", ANY),
        (COLON_9, "register", ANY),
        (DEVICES, "devices", [SHARES[0], []]),
        ("GPU-1,NVIDIA,4000,30:;GPU-1,MLU,4000,30:;", "devices", SHARES),
        ("GPU-1,NVIDIA,4000,30,more:", "devices", ANY),
        (";GPU-1,NVIDIA,4000,30:;", "devices", [[], SHARES[0]]),
        ("2026-08-21T10:00:00Z,team-a,train-0", "lock", ANY),
        ("2026-08-21T10:00:00Z", "lock", ANY),
        ("Requesting_2026-08-21 10:00:00", "handshake", ANY),
        ("Reported 2026-08-21 10:00:00.123 +0000 UTC m=+1", "handshake", ANY),
        (
            *("Deleted_2026-08-21 10:00:00", "handshake"),
            {"word": "Deleted", "time": "2026-08-21T10:00:00"},
        ),
        (CONFIG, "nodeconfig", [{"name": "node-a", "devicesplitcount": 5}]),
        ('{"other":1,"NodeConfig":[]}', "nodeconfig", []),
        (";", "devices", [[]]),  # what is left of a served pod is its containers
        (";;", "devices", [[], []]),
        (",,0,0:;", "devices", [[]]),
    ],
)
def test_each_value_is_known_by_its_form_and_has_its_data(text, kind, data, capsys):
    found = decoded(capsys, text)

    assert kind == found["kind"]
    assert data in (ANY, found["data"])


def test_both_forms_of_the_register_annotation_say_the_same(capsys):
    of_json = REGISTER.replace("NVIDIA H100", "NVIDIA-Tesla P4").replace(
        "}", ',"mode":"hami-core","health":true}'
    )

    assert decoded(capsys, of_json) == decoded(capsys, COLON)


@pytest.mark.parametrize(
    "form",
    [
        " {} \n",
        "'{}'",
        '"{}"',
        "hami.io/vgpu-devices-allocated: {}",
        "hami.io/vgpu-devices-allocated={}",
        '"hami.io/vgpu-devices-allocated": "{}",',
    ],
)
def test_a_value_may_be_copied_as_kubectl_shows_it(form, capsys):
    assert decoded(capsys, DEVICES) == decoded(capsys, form.format(DEVICES))


def test_nothing_to_decode_is_a_usage_error_and_a_terminal_is_not_waited_for(capsys, monkeypatch):
    typed = io.StringIO("typed")
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", typed)

    assert [2, 2] == [dispatch(words, {}) for words in (["decode"], ["decode", ""])]
    waits, empty = capsys.readouterr().err.splitlines()
    assert "give a value or pipe one in" in waits
    assert "nothing to decode" in empty


@pytest.mark.parametrize("words", [[], ["-"]])
def test_a_value_is_read_from_stdin_too(words, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{COLON}\n"))

    assert decoded(capsys, *words)["kind"] == "register"


FORMS = ("register annotation", "devices", "node lock", "handshake", "nodeconfig", "< FILE")


@pytest.mark.parametrize(
    "text",
    ["garbage", ":", '{"x', '{"apiVersion":"v1","kind":"Node"}', "a,b", "a,b,c:", "2026", "{}"],
)
def test_a_text_of_no_known_form_is_refused_with_the_forms(text, capsys):
    sentence = refused(capsys, text)

    assert [] == [form for form in FORMS if form not in sentence]


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("devices", "a,b,c;", "3 of 4 fields"),
        ("devices", "GPU-1,NVIDIA,x,30:", ""),
        ("devices", ",:,;", ""),
        ("register", "[{}]", "a GPU has no id"),
        ("register", "[", ""),
        ("register", "null", ""),
        ("register", "GPU-1,10,1,100,T,0,true,0:", ""),
        ("register", '[{"containerIndex":0,"deviceIndex":0}]', ""),
        ("lock", "2026-08-21T10:00:00Z,a", "2 parts"),
        ("lock", "2026-13-21T10:00:00Z", ""),
        ("nodeconfig", '{"nodeconfig":[1]}', "keys and values are expected here, not `1`"),
        ("nodeconfig", '{"nodeconfig":[', ""),
    ],
)
def test_a_malformed_value_is_refused_as_that_with_its_mistake(kind, text, says, capsys):
    sentence = refused(capsys, text)

    assert sentence.startswith(f"hami-agent decode: not a valid {kind} value: ")
    assert says in sentence


@pytest.mark.parametrize("form", [["-o", "json"], ["--output", "json"]])
def test_json_is_asked_for_as_of_other_verbs_and_is_what_there_is(capsys, form):
    plain = decoded(capsys, REGISTER)

    assert plain == decoded(capsys, *form, REGISTER)
    assert {"apiVersion", "kind", "data"} == plain.keys()
    assert dispatch(["decode", "-o", "table", REGISTER], {}) == 2
