"""Seven recorded histories of HAMi's own scheduler on a real cluster judge the agent's services.

Each is replayed with watches that lag. Every Allocate gets the share of the pod and container that
the trace names; every lock goes in time; no write concerns another pod.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import product

import pytest

from tests.machine.playing import silence
from tests.traces.judging import reads, written, wrong
from tests.traces.plants import plants
from tests.traces.replay import replay
from tests.traces.trace import NAMES, load

LAGS = (0.0, 0.005, 0.05, 0.5)
"""Seconds from a write to its frame of a watch."""
SILENT = 3600.0
"""A watch that is dead and does not say so."""
APART = ((0.0, 0.5), (0.5, 0.0), (2.0, 2.0), (0.0, SILENT), (SILENT, 0.0))
"""The pods' watch and the Node's: they are two, and know nothing of each other."""


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    with silence():
        yield


@pytest.mark.parametrize(("pods_lag", "node_lag"), [*((lag, lag) for lag in LAGS), *APART])
@pytest.mark.parametrize("name", NAMES)
async def test_every_recorded_allocate_is_answered_right(name, pods_lag, node_lag) -> None:
    story = await replay(load(name), pods_lag=pods_lag, node_lag=node_lag)

    assert [] == wrong(story)
    if (pods_lag, node_lag) not in APART:
        once = dict.fromkeys(product(story.trace.settled, ("patch", "lock")), 1)
        assert once == written(story)


@pytest.mark.parametrize("name", NAMES)
async def test_an_answer_costs_one_read_and_names_the_gpus_preferred(name: str) -> None:
    story = await replay(load(name), pods_lag=0.0, node_lag=0.0)
    served = [answer for answer in story.answers if answer.call.container]
    assert served
    assert [] == [one for one in served if reads(one, story) - Counter(get_pod=1)]
    for answer in served:
        gpus = sorted(text.rpartition("-")[0] for text in answer.ids)
        assert sorted(slot.gpu for slot in answer.call.slots) == gpus


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("name", NAMES)
async def test_a_kubelet_that_cannot_be_asked_for_a_pod_is_answered_right(name, lag):
    story = await replay(load(name), pods_lag=lag, node_lag=lag, can_get=False)
    assert [] == wrong(story)


@pytest.mark.parametrize("lag", LAGS)
@pytest.mark.parametrize("refused", [0, 1])
async def test_the_lock_of_a_pod_that_is_gone_goes_where_no_scheduler_takes_it(refused, lag):
    trace = load("deleted-early").until_refused(refused)
    story = await replay(trace, pods_lag=lag, node_lag=lag)
    assert "agent" == story.cluster.locks[-1].by
    assert [] == wrong(story)


@pytest.mark.parametrize("name", plants())
async def test_a_planted_bug_is_found(name: str) -> None:
    patch, trace, breach, lag = plants()[name]
    with patch:
        story = await replay(load(trace), pods_lag=lag, node_lag=lag)
    assert any(breach in text for text in wrong(story))
