"""What was read from all sources at one moment: gives the settings as often as facts change."""

import dataclasses

from agent.settings.plan import Given, Plan
from agent.settings.profiles import NodeFacts
from agent.settings.schema import Settings, build


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
        """The settings of this node; it is named by the sources, else by `facts`, else by its host.

        Raises SettingsError: values do not go together, or not with these GPUs.
        """
        named = self.plan.resolve(NodeFacts()).settings["node.name"].value
        name = str(named or facts.name or self.host_name)
        resolved = self.plan.resolve(dataclasses.replace(facts, name=name))
        gpus = len(facts.gpu_models or ())
        return build(resolved.settings, host_name=name, gpus=max(1, gpus))
