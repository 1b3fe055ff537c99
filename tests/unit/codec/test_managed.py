"""Who wrote an annotation last, as the API server keeps it."""

from typing import Any

import pytest

from agent.cluster import REGISTER
from agent.kube.objects import entries, other_writer

EARLY, LATE = "2026-01-01T00:00:00Z", "2026-01-01T00:00:30Z"


def by(manager: str, time: str, *keys: str) -> dict[str, Any]:
    fields = {"f:metadata": {"f:annotations": {f"f:{key}": {} for key in keys}}}
    return {"manager": manager, "time": time, "fieldsV1": fields}


@pytest.mark.parametrize(
    ("managed", "writer"),
    [
        ([by("plugin", EARLY, REGISTER)], f"plugin {EARLY}"),
        ([by("plugin", EARLY, REGISTER), by("other", LATE, REGISTER)], f"other {LATE}"),
        ([by("plugin", LATE, REGISTER), by("hami-agent", EARLY, REGISTER)], ""),
        ([by("plugin", EARLY, "seen")], ""),
        ([by("hami-agent-uninstall", EARLY, REGISTER)], f"hami-agent-uninstall {EARLY}"),
        ("none", ""),
        ([None, {"manager": 1, "fieldsV1": {"f:metadata": []}}], ""),
        (None, ""),
    ],
)
def test_who_but_an_agent_wrote_last_is_told_with_the_time(managed: Any, writer: str):
    assert writer == other_writer(entries({"managedFields": managed}), REGISTER)
