"""A stream is opened again at once, or later the more often it broke."""

import asyncio

from agent.kit.tasks import Reopening
from agent.kit.timing import Tally
from tests.fakes.chance import NoChance


class AlwaysMost(NoChance):
    """The longest that chance allows."""

    def uniform(self, a: float, b: float) -> float:
        """The upper end."""
        del a
        return b


def a_reopening(chance: NoChance | None = None) -> tuple[Reopening, Tally]:
    restarts = Tally("restarts_total", "Streams that were over.", ("reason",))
    return Reopening(restarts, chance or NoChance()), restarts


async def test_a_stream_that_lasted_as_long_as_asked_is_followed_by_the_next_at_once():
    stream, restarts = a_reopening(AlwaysMost())
    stream.opening()
    await asyncio.sleep(300)

    assert 0.0 == stream.ended()
    assert ((("ended",), 1),) == restarts.items()


async def test_clients_whose_streams_a_server_ends_or_breaks_at_once_come_back_within_4_s():
    ended, _ = a_reopening(AlwaysMost())
    broke, _ = a_reopening(AlwaysMost())
    ended.opening()
    broke.opening()
    await asyncio.sleep(299)

    assert (4.0, 4.0) == (ended.ended(), broke.broke())
    assert (0.0, 0.0) == (a_reopening()[0].broke(), a_reopening()[0].gone())


async def test_a_stream_that_ends_at_once_waits_longer_each_time():
    stream, _ = a_reopening()
    stream.opening()

    assert [1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 30.0] == [stream.ended() for _ in range(7)]
    assert 0 == stream.failures


async def test_a_stream_that_breaks_waits_longer_each_time_and_is_counted():
    stream, restarts = a_reopening()
    stream.opening()

    assert [0.0, 1.0, 2.0] == [stream.broke() for _ in range(3)]
    assert 3 == stream.failures
    assert ((("error",), 3),) == restarts.items()


async def test_the_other_side_may_ask_for_more_time_but_not_for_less():
    stream, _ = a_reopening()
    stream.opening()

    assert (100.0, 1.0) == (stream.broke(at_least=100.0), stream.broke(at_least=0.5))


async def test_half_a_minute_clears_the_memory_and_less_does_not():
    stream, _ = a_reopening()
    stream.opening()
    stream.broke()
    stream.broke()
    stream.opening()
    await asyncio.sleep(29)
    assert (2.0, 3) == (stream.broke(), stream.failures)
    stream.opening()
    await asyncio.sleep(30)

    assert (0.0, 1) == (stream.broke(), stream.failures)


async def test_a_place_lost_again_is_looked_up_later():
    stream, restarts = a_reopening(AlwaysMost())
    stream.opening()
    assert [4.0, 30.0, 30.0] == [stream.gone() for _ in range(3)]
    stream.opening()
    await asyncio.sleep(30)

    assert 4.0 == stream.gone()
    assert ((("gone",), 4),) == restarts.items()
