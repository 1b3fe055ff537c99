"""The agent's own readiness page, line by line, and whether it is alone on the node."""

import pytest

from agent.node.findings import Finding, PreflightCheck
from agent.node.preflight import PathFacts, PluginSocket
from agent.node.scheduling import AgentAnswer, judge_agent, judge_instances

PAGE = "[+]state ok\n[+]registered ok\n[!]gpus degraded: there are no GPUs to share\n"
UNREADY = "[+]state ok\n[-]registered failed: the kubelet is away\n[-]stream failed: no\n"
LOCK = PathFacts("/run/lock", "file")


def judged(**answer) -> list[Finding]:
    return list(judge_agent(AgentAnswer("/run/api.sock", **answer)))


def verdicts(findings) -> list[tuple[str, str]]:
    return [(one.subject, one.verdict.value) for one in findings]


def test_an_agent_that_is_ready_is_well_in_one_line():
    (found,) = judged(status=200, text="[+]state ok\n[+]registered ok\nreadyz check passed\n")

    assert ("ok", "the agent is ready; 2 checks of it passed") == (found.verdict.value, found.said)


def test_a_degraded_check_is_a_note_beside_it():
    found = judged(status=200, text=PAGE + "readyz check passed\n")

    assert [("gpus", "note"), ("/run/api.sock", "ok")] == verdicts(found)
    assert "there are no GPUs to share" == found[0].said
    assert (PreflightCheck.DRIVER,) == found[0].causes


def test_of_ill_gpus_another_verb_says_what_to_do():
    text = "[!]gpu_health degraded: GPU 2 is bad: XID 48 [H-048]\n"
    found = judged(status=200, text=f"[+]state ok\n{text}")

    assert "`hami-agent status`" in found[0].advice
    assert "no new pod gets this GPU; pods that hold it may fail" == found[0].means


def test_each_failed_check_is_wrong_with_its_own_sentence():
    found = judged(status=503, text=UNREADY + "readyz check failed\n")

    assert [("registered", "WRONG"), ("stream", "WRONG")] == verdicts(found)
    assert "the kubelet is away" == found[0].said
    assert PreflightCheck.KUBELET in found[0].causes


def test_a_check_that_the_doctor_does_not_know_has_no_cause():
    (found,) = judged(status=503, text="[-]novelty failed: \n")

    assert ((), "fails") == (found.causes, found.said)


@pytest.mark.parametrize(
    ("answer", "verdict", "said"),
    [
        ({"failure": "no such file"}, "WRONG", "no agent answers: no such file"),
        ({"failure": "denied", "denied": True}, "unknown", "denied"),
        ({"status": 404, "text": "nothing"}, "WRONG", "answers 404, but not as an agent"),
        ({"status": 301, "text": PAGE}, "WRONG", "answers 301, but not as an agent"),
    ],
)
def test_what_is_no_answer_of_an_agent_is_told(answer, verdict, said):
    (found,) = judged(**answer)

    assert (verdict, said) == (found.verdict.value, found.said)
    assert found.advice


def sockets(*names: str, alive: bool = True) -> list[PluginSocket]:
    return [PluginSocket(f"/d/{name}", alive) for name in names]


ONE = sockets("hami-gpu-0123abcd.sock")
TWO = sockets("hami-gpu-0123abcd.sock", "hami-gpu-89abcdef.sock")


@pytest.mark.parametrize(
    ("holder", "waiting", "found", "verdict", "said"),
    [
        ("pid 7", (), ONE, "ok", "last taken by pid 7; 1 live socket of agents"),
        ("pid 7", (), [], "ok", "last taken by pid 7; 0 live sockets"),
        ("", (), [], "ok", "names no holder; 0 live sockets"),
        ("pid 7", (), TWO, "WRONG", "2 agents serve the kubelet of this node"),
        ("pid 7", (8,), TWO, "WRONG", "2 agents serve"),
        ("pid 7", (8, 9), ONE, "note", "(pid 8, 9)"),
        (
            "pid 7",
            (),
            [*ONE, *sockets("hami-gpu-89abcdef.sock", alive=False)],
            "ok",
            "1 live socket of",
        ),
        ("pid 7", (), [*ONE, *sockets("nvidia-gpu.sock", "hami-x.sock")], "ok", "1 live socket of"),
    ],
)
def test_two_that_serve_are_wrong_and_one_that_waits_is_a_note(
    holder, waiting, found, verdict, said
):
    finding = judge_instances(LOCK, holder, waiting, found)

    assert verdict == finding.verdict.value
    assert said in finding.said
    assert (verdict != "ok") == bool(finding.advice)
