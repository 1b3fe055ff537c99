"""Reads the cells for the documents of the read API."""

from agent import __version__
from agent.app.front import Front
from agent.app.watching import WebSubjects
from agent.codec.status_document import NodeStatus, SettingStatus
from agent.host.clock import SystemClock
from agent.settings.fields import Setting
from agent.settings.sections import Settings
from agent.web.status import StatusFacts


def status_facts(settings: Settings, watched: WebSubjects) -> StatusFacts | None:
    """What the agent knows now; None for a standby."""
    parts = watched.parts
    if parts is None:
        return None
    front, back = parts.front, parts.back
    facts, knowing = front.facts, front.knowing
    return StatusFacts(
        now=SystemClock().now(),
        about=_about(settings, front),
        checks=watched.checks(),
        node=facts.node.value,
        inventory=facts.inventory.value,
        slices=facts.slices.value,
        ledger=front.state.ledger.value,
        newest=knowing.samples.newest,
        history=knowing.samples.history,
        used=back.usage.containers.newest,
        past=back.usage.containers.history,
        changes=front.journal.changes,
        refusals=front.journal.refusals,
        journal_since=front.journal.since,
        settings=lambda: _settings(front),
        pods=facts.pods.value,
    )


def _about(settings: Settings, front: Front) -> NodeStatus:
    sharing = front.facts.sharing.value
    values, _ = front.settings.accepted()
    return NodeStatus(
        name=settings.node,
        version=__version__,
        started_at=front.journal.started,
        scheduler="hami" if settings.plain is None else "none",
        resource=front.facts.resource.value,
        kubelet=front.registration.state.value.text,
        observe=settings.observe,
        profiles=values.profiles,
        split_count=sharing.split_count,
        memory_scaling=sharing.memory_scaling,
        core_scaling=sharing.core_scaling,
    )


def _settings(front: Front) -> tuple[SettingStatus, ...]:
    values, late = front.settings.accepted()
    return tuple(_setting(one, pending=one.field.key in late) for one in values.values())


def _setting(setting: Setting, *, pending: bool) -> SettingStatus:
    value = setting.value
    return SettingStatus(
        key=setting.field.key,
        value=list(value) if isinstance(value, tuple) else value,
        origin=setting.origin,
        pending=pending,
    )
