"""What was read from all sources at one moment: gives the settings as often as facts change."""

import dataclasses
from collections.abc import Mapping
from typing import Final

from agent.settings.kinds import Value
from agent.settings.plan import Given, Plan
from agent.settings.profiles import NodeFacts
from agent.settings.sections import Settings, build

NODE_NAME: Final = "node.name"


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """The plan, on a host of that name, and the sources that it was made of."""

    plan: Plan
    host_name: str
    given: Given = dataclasses.field(default_factory=Given)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was passed over, with its place."""
        return self.plan.warnings

    def settings(self, facts: NodeFacts) -> Settings:
        """The settings of the node that `facts` name, else the sources, else its host.

        Raises SettingsError: values do not go together, or not with these GPUs.
        """
        name = facts.name or self.name
        resolved = self.plan.resolve(dataclasses.replace(facts, name=name))
        gpus = len(facts.gpu_models or ())
        return build(resolved.settings, host_name=name, gpus=max(1, gpus))

    @property
    def name(self) -> str:
        """The node's name, by the sources or by its host."""
        named = self.plan.resolve(NodeFacts()).settings[NODE_NAME].value
        return str(named or self.host_name)

    def fixed(self) -> Mapping[str, Value]:
        """The settings that act at the start alone, the same for all facts, by key."""
        found = self.plan.resolve(NodeFacts()).settings
        values = {key: one.value for key, one in found.items() if not one.field.live}
        return values | {NODE_NAME: self.name}
