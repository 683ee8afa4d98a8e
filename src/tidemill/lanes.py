"""Work for a few threads at a time, taken in order: reading, copying and writing large pieces, which let Python go.

Who asks for it sees one thing after the other, in the caller's own thread: jobs are asked for in order, what they
return is handed over in order, and the first failure in that order is the caller's.
"""

import itertools
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Generic, Self, TypeVar

__all__ = ["THREADS", "in_order"]

THREADS = min(max(len(os.sched_getaffinity(0)), 4), 8)
"""Of a disk's work: as many as there are cores, within what keeps a disk busy and what it has use for."""
_AHEAD = 2  # jobs for each thread before the oldest is waited for: one that is slow leaves the others busy

T = TypeVar("T")


def in_order(jobs: Iterable[Callable[[], T]], taken: Callable[[T], None], *, threads: int = THREADS) -> None:
    """Run `jobs`, at most `threads` of them at the same time, and call `taken` with what each returns, in order.

    Jobs are asked for as there is room, one or two for each thread ahead of what is taken. One that is alone runs in
    the caller's thread. Raises what the first failing one of them raised, or `jobs`, or `taken`; nothing runs any more
    then.
    """
    coming = iter(jobs)
    first = list(itertools.islice(coming, 2))
    if threads == 1 or len(first) < 2:
        for job in itertools.chain(first, coming):
            taken(job())
        return
    waiting: deque[_Ticket[T]] = deque()
    with _Lanes(threads) as lanes:
        for job in itertools.chain(first, coming):
            waiting.append(lanes.begin(job))
            while waiting and (len(waiting) > _AHEAD * threads or waiting[0].ended):
                taken(waiting.popleft().result())
        while waiting:
            taken(waiting.popleft().result())


class _Ticket(Generic[T]):
    """A job, and in the end what became of it."""

    def __init__(self, job: Callable[[], T]) -> None:
        self._job = job
        self._ended = threading.Event()
        self._values: list[T] = []
        self._error: BaseException | None = None

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def run(self) -> None:
        try:
            self._values.append(self._job())
        except BaseException as error:
            self._error = error
        self._ended.set()

    def result(self) -> T:
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._values.pop()


class _Lanes:
    """Threads that run tickets, begun as they are needed; when the block ends none of them runs any more.

    They do not keep the process alive: one may hang in a disk that does not answer.
    """

    def __init__(self, threads: int) -> None:
        self._most = threads
        self._threads: list[threading.Thread] = []
        self._tickets: queue.SimpleQueue[_Ticket[T] | None] = queue.SimpleQueue()  # type: ignore[valid-type]
        self._stopped = False

    def begin(self, job: Callable[[], T]) -> _Ticket[T]:
        ticket = _Ticket(job)
        self._tickets.put(ticket)
        if len(self._threads) < self._most:
            thread = threading.Thread(target=self._work, name="lane", daemon=True)
            thread.start()
            self._threads.append(thread)
        return ticket

    def _work(self) -> None:
        while (ticket := self._tickets.get()) is not None:
            if not self._stopped:
                ticket.run()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped = True
        for _ in self._threads:
            self._tickets.put(None)
        for thread in self._threads:
            thread.join()
