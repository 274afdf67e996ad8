"""The waiting queue and the rule by which long requests leave slots to short ones."""

from mercury_jax.serve.engine.request import EngineRequest, RequestHandle
from mercury_jax.serve.engine.scheduler import LONG_REQUEST, TOKENS_PER_SECOND, RequestQueue, may_run


def waiting(max_tokens, arrival_time):
    """A request of one prompt token that arrived at a given time."""
    handle = RequestHandle(EngineRequest(prompt=(1,), max_tokens=max_tokens), lambda: None)
    handle.arrival_time = arrival_time
    return handle


def test_short_requests_overtake_long_ones_and_none_starves():
    queue = RequestQueue(9, lambda: None)
    long, short, late = waiting(5000, 0.0), waiting(10, 1.0), waiting(10, 5000 / TOKENS_PER_SECOND + 1)
    for handle in (long, late, short):
        queue.add(handle)
    assert [queue.take() for _ in range(3)] == [short, long, late]


def test_long_requests_leave_a_quarter_of_the_slots_to_short_ones():
    long = EngineRequest(prompt=(1,), max_tokens=LONG_REQUEST)
    short = EngineRequest(prompt=(1,), max_tokens=LONG_REQUEST - 2)
    assert [may_run(long, [long] * n, 8) for n in (0, 5, 6)] == [True, True, False]
    assert may_run(short, [long] * 6, 8) and may_run(long, [short] * 7, 8)
    assert may_run(long, [], 1) and may_run(long, [], 2)
