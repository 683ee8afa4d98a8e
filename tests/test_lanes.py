"""tidemill.lanes: a few threads, of which the caller sees one thing after the other."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tidemill.lanes import THREADS, in_order


def after(seconds: float, value: int) -> int:
    time.sleep(seconds)
    return value


def test_results_come_in_order_whichever_is_ready_first() -> None:
    taken: list[int] = []
    in_order((partial(after, 0.02 if number % 3 == 0 else 0, number) for number in range(20)), taken.append)
    assert taken == list(range(20))


def test_so_many_run_at_the_same_time_and_no_more() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def job() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.05)
        with lock:
            running -= 1

    in_order([job] * 12, lambda done: None)
    assert most == THREADS
    most = 0
    in_order([job] * 3, lambda done: None, threads=1)
    assert most == 1


def test_jobs_are_asked_for_by_the_caller_when_there_is_room_for_them() -> None:
    begun: list[int] = []
    ended: list[int] = []

    def jobs() -> Iterator[Callable[[], None]]:
        for number in range(20):
            assert threading.current_thread() is caller
            assert number <= len(ended) + 2 * THREADS + 2
            begun.append(number)
            yield lambda: None

    caller = threading.current_thread()
    in_order(jobs(), lambda done: ended.append(1))
    assert begun == list(range(20))


def test_one_that_is_slow_leaves_the_others_busy_and_what_is_ready_is_taken_at_once() -> None:
    ended, seen, taken = list[int](), list[int](), list[int]()

    def slow() -> int:
        while len(ended) < 2 * THREADS:
            time.sleep(0.001)
        return 0

    def quick(number: int) -> int:
        ended.append(number)
        return number

    def jobs() -> Iterator[Callable[[], int]]:
        yield slow
        yield from (partial(quick, number) for number in range(1, 2 * THREADS + 1))
        while len(taken) < 2 * THREADS:
            seen.append(len(taken))
            yield partial(after, 0.01, -1)

    in_order(jobs(), taken.append)
    assert taken[: 2 * THREADS + 1] == list(range(2 * THREADS + 1))
    assert len(seen) <= 2


def test_one_that_is_alone_takes_no_thread_and_none_takes_nothing() -> None:
    threads: list[threading.Thread] = []
    in_order([threading.current_thread], threads.append)
    in_order([], threads.append)
    assert threads == [threading.current_thread()]


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_the_first_failure_in_order_is_the_callers_and_nothing_runs_afterwards(error: type[BaseException]) -> None:
    running, taken = [], list[int]()

    def job(number: int) -> int:
        running.append(number)
        time.sleep(0.05 if number == 3 else 0)
        if number in (3, 4):
            raise error(number)
        running.remove(number)
        return number

    before = threading.active_count()
    with pytest.raises(error, match="3"):
        in_order((partial(job, number) for number in range(100)), taken.append)
    assert taken == [0, 1, 2] and set(running) <= {3, 4}
    assert threading.active_count() == before


def test_what_the_caller_raises_ends_all_of_them() -> None:
    begun: list[int] = []

    def job(number: int) -> None:
        begun.append(number)
        time.sleep(0.01)

    def stop(done: None) -> None:
        raise KeyboardInterrupt

    def jobs() -> Iterator[Callable[[], None]]:
        yield from (partial(job, number) for number in range(3))
        raise LookupError("no more")

    with pytest.raises(KeyboardInterrupt):
        in_order((partial(job, number) for number in range(100)), stop)
    count = len(begun)
    time.sleep(0.05)
    assert len(begun) == count < 10
    with pytest.raises(LookupError):
        in_order(jobs(), lambda done: None)
