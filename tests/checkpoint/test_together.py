import threading
import time
from collections.abc import Callable
from itertools import count

import pytest

from tidemill.checkpoint.together import together

Advance = Callable[[int], None]


def nothing(amount: int) -> None:
    """Progress that nobody follows."""


def endless(advance: Advance) -> int:
    while True:
        advance(1)
        time.sleep(0.001)


def test_values_come_in_order_and_the_jobs_work_at_the_same_time() -> None:
    meeting = threading.Barrier(3, timeout=5)

    def job(number: int) -> Callable[[Advance], int]:
        def work(advance: Advance) -> int:
            meeting.wait()
            time.sleep(0.01 * (3 - number))
            return number

        return work

    assert together([job(0), job(1), job(2)], nothing) == [0, 1, 2]
    assert together([], nothing) == []


def test_one_that_is_alone_runs_in_the_callers_thread() -> None:
    assert together([lambda advance: threading.current_thread()], nothing) == [threading.current_thread()]


def test_progress_is_told_by_one_at_a_time() -> None:
    total, inside = 0, threading.Lock()

    def advance(amount: int) -> None:
        nonlocal total
        assert inside.acquire(blocking=False)
        before = total
        time.sleep(0)
        total = before + amount
        inside.release()

    def job(tell: Advance) -> None:
        for _ in range(200):
            tell(1)

    together([job] * 4, advance)
    assert total == 800


def test_the_first_error_ends_the_others_and_wins() -> None:
    ended: list[str] = []

    def fail(advance: Advance) -> int:
        time.sleep(0.02)
        raise OSError("the first")

    def other(advance: Advance) -> int:
        try:
            return endless(advance)
        finally:
            ended.append("other")
            raise ValueError("a later one")

    with pytest.raises(OSError, match="the first"):
        together([other, fail, other], nothing)
    assert ended == ["other", "other"]


def test_what_advance_raises_ends_all_of_them() -> None:
    amounts = count()

    def advance(amount: int) -> None:
        if next(amounts) == 20:
            raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        together([endless, endless], advance)
    assert threading.active_count() == before


def test_jobs_that_say_nothing_are_looked_after_so_that_a_wait_can_be_given_up() -> None:
    go = threading.Event()

    def silent(advance: Advance) -> bool:
        return go.wait(10)

    def advance(amount: int) -> None:
        raise TimeoutError("nobody waits any more")

    began = time.monotonic()
    with pytest.raises(TimeoutError, match="nobody waits"):
        together([silent, silent], advance, stragglers=0.1)
    assert time.monotonic() - began < 5
    go.set()
