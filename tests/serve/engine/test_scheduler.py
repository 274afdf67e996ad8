"""The waiting queue and the rule by which long requests leave slots to short ones."""

import threading

import pytest

from mercury_jax.serve.engine.request import EMPTY_SNAPSHOT, EngineRequest, RequestHandle, RequestRejected
from mercury_jax.serve.engine.scheduler import LONG_REQUEST, TOKENS_PER_SECOND, RequestQueue, may_run


def waiting(max_tokens, arrival_time):
    """A request of one prompt token that arrived at a given time."""
    handle = RequestHandle(EngineRequest(prompt=(1,), max_tokens=max_tokens), lambda: None)
    handle.arrival_time = arrival_time
    return handle


def test_short_requests_overtake_long_ones_and_none_starves():
    queue = RequestQueue(9, 0, lambda: None)
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


def test_a_request_is_unfinished_from_its_arrival_to_its_last_snapshot():
    queue = RequestQueue(1, 1, lambda: None)
    first, second = waiting(4, 0.0), waiting(4, 1.0)
    queue.add(first)
    assert queue.take() is first and queue.unfinished == queue.running == [first]
    queue.add(second)
    with pytest.raises(RequestRejected, match="1 requests are waiting"):
        queue.add(waiting(4, 2.0))
    assert queue.unfinished == [first, second]
    first.publish(EMPTY_SNAPSHOT._replace(finish="stop"))
    second.cancel()
    assert queue.take_cancelled() == [second] and queue.unfinished == [second] and len(queue) == 0


def test_closing_waits_for_an_arrival_under_way():
    """Otherwise a request might enter the queue of an engine that has looked into it for the last time."""
    arriving, go_on = threading.Event(), threading.Event()

    class SlowRequest(EngineRequest):
        @property
        def max_length(self):
            arriving.set()
            go_on.wait(10)
            return 1

    queue = RequestQueue(9, 1, lambda: None)
    late = RequestHandle(SlowRequest(prompt=(1,), max_tokens=1), lambda: None)
    adding = threading.Thread(target=queue.add, args=(late,))
    adding.start()
    assert arriving.wait(10)
    closing = threading.Thread(target=queue.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    go_on.set()
    closing.join(10)
    assert queue.unfinished == [late]
    adding.join(10)
    with pytest.raises(RequestRejected, match="closing"):
        queue.add(waiting(4, 0.0))
