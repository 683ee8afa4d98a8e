"""A transfer whose copies are late: on a thread of its own, each after a while, as on a device."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from tidemill.residency.transfer import Pair

__all__ = ["LateTransfer"]


class LateTransfer:
    """Until a copy is made its target holds no number, so that whoever touches it too early computes NaN."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.copies = 0
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            self._queue.get()()

    def quiet(self) -> None:
        """Nothing else is queued."""

    def begin(self) -> None:
        """Copies go in order anyway."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Later."""
        target.fill_(0xFF)
        self.copies += 1
        self._queue.put(lambda: (time.sleep(self.seconds), target.copy_(source)))

    def mark(self) -> Callable[[], None]:
        """Behind what is queued."""
        done = threading.Event()
        self._queue.put(done.set)
        return lambda: self._wait(done)

    def copy_all(self, groups: Iterable[Iterable[Pair]]) -> list[Callable[[], None]]:
        """In order."""
        return [self._copied(group) for group in groups]

    def _copied(self, group: Iterable[Pair]) -> Callable[[], None]:
        for target, source in group:
            self.copy(target, source)
        return self.mark()

    def finish(self) -> None:
        """All of it."""
        self.mark()()

    def reserve(self, sizes: Sequence[int]) -> None:
        """There is room."""

    def give_back(self) -> None:
        """Nothing is kept."""

    def _wait(self, done: threading.Event) -> None:
        assert done.wait(30)
