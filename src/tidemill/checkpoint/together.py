"""Several jobs at the same time, as one: the first error ends them all, and none is left behind without a word."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["together"]

_LOOK = 0.5  # seconds between looks at whether the jobs shall go on
_STRAGGLERS = 10.0  # seconds for the others to end once one has failed

T = TypeVar("T")
Advance = Callable[[int], None]


class _Ended(Exception):
    """Raised inside a job because another one failed."""


class _Crew:
    """What the jobs share: one `advance`, used by one at a time, and the first failure."""

    def __init__(self, advance: Advance) -> None:
        self._advance = advance
        self._lock = threading.Lock()
        self.failure: BaseException | None = None
        self.ended: queue.SimpleQueue[int] = queue.SimpleQueue()

    def advance(self, count: int) -> None:
        with self._lock:
            if self.failure is not None:
                raise _Ended("another one failed")
            self._advance(count)

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self.failure = self.failure or error

    def watch(self, jobs: int) -> None:
        """Until all have ended or one has failed; `advance(0)` now and then, which may raise to stop them."""
        while jobs and self.failure is None:
            try:
                self.ended.get(timeout=_LOOK)
                jobs -= 1
            except queue.Empty:
                self.advance(0)


def together(jobs: Sequence[Callable[[Advance], T]], advance: Advance, *, stragglers: float = _STRAGGLERS) -> list[T]:
    """What each job returns, in order; one that is alone runs in the caller's thread.

    Each is given an `advance` that may be called from any thread; what it raises ends all of them. Raises the first
    error when the others have ended too, each at its next call of `advance`, or after `stragglers` seconds: one that
    still lives then is left to itself, and what it does later is lost.
    """
    if len(jobs) == 1:
        return [jobs[0](advance)]
    crew = _Crew(advance)
    values: dict[int, T] = {}

    def work(number: int) -> None:
        try:
            values[number] = jobs[number](crew.advance)
        except BaseException as error:
            crew.fail(error)
        finally:
            crew.ended.put(number)

    threads = [
        threading.Thread(target=work, args=(number,), name=f"together-{number}", daemon=True)
        for number in range(len(jobs))
    ]
    try:
        for thread in threads:
            thread.start()
        crew.watch(len(jobs))
    except BaseException as error:
        crew.fail(error)
    if crew.failure is not None:
        ends = time.monotonic() + stragglers
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, ends - time.monotonic()))
        raise crew.failure
    return [values[number] for number in range(len(jobs))]
