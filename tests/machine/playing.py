"""Playing histories, and telling nothing of them: the lines would cost more than the histories."""

from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

STEPS = 30


def play(machine: type[RuleBasedStateMachine], histories: int, *, same_ones: bool) -> None:
    """So many histories; `same_ones`: the same at every run."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=histories,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            derandomize=same_ones,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        ),
    )


@contextmanager
def silence() -> Iterator[None]:
    """No log lines."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.configure(**before)
