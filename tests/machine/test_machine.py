"""Random histories of one node: no container gets what is not its own, and all ends well.

A history is up to 30 steps of what happens to pods, kubelet, scheduler, API server, GPUs and the
agent itself, on virtual time. After every step the audit holds what the agent said and wrote
against what the scheduler decided and what the kubelet asked for; at the end all troubles stop, and
five minutes later no pod, lock, row or effect may be left over.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import structlog
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.machine.histories import Histories
from tests.machine.mutants import MUTANTS, Mutant

HISTORIES = 300
MANY = 10_000
STEPS = 30
ENOUGH = 1500
"""Histories within which each planted bug is found."""


def play(histories: int, *, same_ones: bool) -> None:
    """So many histories; `same_ones`: the same at every run."""
    run_state_machine_as_test(
        Histories,
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


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    """The lines would cost more than the histories."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    yield
    structlog.configure(**before)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_history_breaks_an_invariant() -> None:
    play(HISTORIES, same_ones=True)


@pytest.mark.histories
@pytest.mark.timeout(7200)
def test_none_of_ten_thousand_histories_breaks_an_invariant() -> None:
    play(MANY, same_ones=False)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_planted_bug_is_found(mutant: Callable[[], Mutant]) -> None:
    planted = mutant()

    with planted.patch, pytest.raises(AssertionError, match=planted.breach):
        play(ENOUGH, same_ones=True)


def test_a_planted_bug_is_gone_when_its_test_is_over() -> None:
    for mutant in MUTANTS:
        patch: AbstractContextManager[None] = mutant().patch
        with patch:
            pass
