"""Replicas of an engine that died, and new ones in their place.

A new one has no weights. It is left out of every rollout until a whole hand-over has reached it with all others; what
its forerunner left unanswered goes to those that are left.
"""

from collections.abc import Sequence

from tidemill.contracts.events import Emit, Metrics, Notice
from tidemill.contracts.workers import WorkerGroup
from tidemill.errors import WorkerDiedError, WorkerError

__all__ = ["Replacing"]


class Replacing:
    """Counts over the whole run: `limit` times at most a replica of `group` is replaced; 0 is never."""

    def __init__(self, group: WorkerGroup, *, limit: int, emit: Emit) -> None:
        self._group, self._limit, self._emit = group, limit, emit
        self._replaced = 0
        self._gone: dict[int, WorkerError] = {}
        self._empty: set[int] = set()

    @property
    def serving(self) -> tuple[int, ...]:
        """Those that hold the present weights."""
        return tuple(r for r in range(len(self._group.names)) if r not in self._gone and r not in self._empty)

    def lose(self, replica: int, error: WorkerError, unanswered: int) -> None:
        """It is gone, with so many requests. Raises `error` when nobody is left, or it may not be replaced."""
        self._gone[replica] = error
        if not self.serving or self._replaced + len(self._gone) > self._limit:
            raise error
        left = len(self.serving)
        text = f"{error.args[0].partition(';')[0]}; its {unanswered} requests go to the {left} that are left"
        self._emit(Notice(text=text, level="warning"))
        self._emit(Metrics(values={"engine/reissued": float(unanswered)}))

    def look(self, deadline: float) -> None:
        """Find those that died unnoticed. Raises WorkerDiedError when one may not be replaced."""
        if self._limit == 0:
            return
        for replica in range(len(self._group.names)):
            try:
                self._group.control(replica, "answered", deadline=deadline)
            except WorkerDiedError as error:
                self._gone[replica] = error
                if self._replaced + len(self._gone) > self._limit:
                    raise

    def replace(self, deadline: float) -> Sequence[int]:
        """Start others in the place of those that are gone: asleep and empty. Which they are."""
        done = sorted(self._gone)
        for replica in done:
            self._group.restart(replica, deadline=deadline)
            del self._gone[replica]
            self._empty.add(replica)
            self._replaced += 1
            text = f"{self._group.names[replica]} was started again ({self._replaced} of {self._limit})"
            self._emit(Notice(text=f"{text}; it serves again when it has had a hand-over", level="warning"))
            self._emit(Metrics(values={"engine/restarted": 1.0}))
        return done

    def filled(self) -> None:
        """All hold one version again."""
        self._empty.clear()
