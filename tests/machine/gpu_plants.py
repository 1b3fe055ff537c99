"""Bugs to plant in how GPUs are judged: what the random histories have to find."""

import asyncio
import datetime as dt

import msgspec
import pytest

from agent.errors import DriverError
from agent.health import judge
from agent.health.judge import relieved, worse
from agent.health.watch import HealthWatch
from agent.model import Action, Cause, Condition, GpuSigns, Health


def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restarted agent remembers nothing."""

    def well(one: Health, now, _settings, *, boot_changed: bool) -> Health:
        del boot_changed
        return Health(Condition.OK, since=now)

    monkeypatch.setattr("agent.health.judge.remembered", well)


def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """One passed probe and all is well."""
    monkeypatch.setattr(judge, "quiet_time", lambda *_: 0.0)


def easy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing needs a reset."""
    verdict = judge.verdict

    def unneeded(*args, needs: Action = Action.NONE, **more) -> Health:
        del needs
        return verdict(*args, **more)

    monkeypatch.setattr(judge, "verdict", unneeded)


def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time before a reset is known counts as a rest after it."""

    def told(one: Health, signs: GpuSigns, now: dt.datetime) -> Health:
        return msgspec.structs.replace(relieved(one, signs, now), quiet_since=one.quiet_since)

    monkeypatch.setattr(judge, "relieved", told)


def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a GPU reports takes the place of the driver's refusal."""

    def newest(one: Health, verdict: Health) -> Health:
        return verdict if one.cause == Cause.REFUSED else worse(one, verdict)

    monkeypatch.setattr(judge, "worse", newest)


def jumpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """One failed probe, and the GPU is bad."""
    monkeypatch.setattr(judge, "is_failing", lambda *_: True)


def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed probes are doubts for ever."""
    monkeypatch.setattr(judge, "is_failing", lambda *_: False)


def touchy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver raises is not dealt with."""
    monkeypatch.setattr("agent.health.watch.GpuError", DriverError)


def talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each GPU of a mishap is a list of its own."""

    async def each(self: HealthWatch) -> None:
        while True:
            await self._reported.wait()
            self._reported.clear()
            reports, self._waiting = tuple(self._waiting), {}
            for report in reports:
                self._publish(self._judged((report,)))
                await asyncio.sleep(0.001)

    monkeypatch.setattr(HealthWatch, "_judge_reports", each)


def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks who is missing in a scan."""
    monkeypatch.setattr(HealthWatch, "scanned", lambda *_: None)


def sweeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """A memory error that names no GPU takes all of them out."""

    def bad_for_all(one: Health, doubt: Health) -> Health:
        if judge.UNNAMED not in doubt.text:
            return worse(one, doubt)
        bad = Condition.BAD
        return (
            judge.verdict(bad, doubt.since, Cause.ECC, "H-ECC", doubt.text) if one.serving else one
        )

    monkeypatch.setattr(judge, "worse", bad_for_all)


PLANTS = {
    "I4": (talkative,),
    "I8": (touchy,),
    "I9": (forgetful, hasty, easy, jumpy, patient, blind, sweeping, restless, trusting),
}
"""By the invariant that finds them."""
