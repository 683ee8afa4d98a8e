"""Snapshots of one rank that the driver knows by number, and the threads that write them.

Every method may be called from any thread, and none waits for a writer: what the rank does meanwhile, waking or
stepping, never stands behind a disk.
"""

import threading
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tidemill.checkpoint.shard import FileLayout, LocalShard
from tidemill.cluster.worker import Failure, failure_of
from tidemill.contracts.checkpoint import Places, Snapshot, WrittenFile
from tidemill.errors import CheckpointError

__all__ = ["SnapshotDesk", "Writing"]


@dataclass(frozen=True, kw_only=True)
class Writing:
    """How far a file is. `value` is what the shard's own method returned, once it has."""

    written: int
    ended: bool
    value: Any
    failure: Failure | None


class _Abandoned(Exception):
    """Raised inside a writing that nobody waits for any more."""


class _Job:
    """One file being written; `abandoned` stops it at its next piece."""

    def __init__(self) -> None:
        self.abandoned = False
        self.now = Writing(written=0, ended=False, value=None, failure=None)

    def advance(self, count: int) -> None:
        if self.abandoned:
            raise _Abandoned("the driver waits for this file no more")
        self.now = Writing(written=self.now.written + count, ended=False, value=None, failure=None)

    def end(self, value: object, failure: Failure | None) -> None:
        self.now = Writing(written=self.now.written, ended=True, value=value, failure=failure)


def _no_job() -> _Job:
    job = _Job()
    job.end(None, None)
    return job


@dataclass
class _Held:
    snapshot: Snapshot
    job: _Job = field(default_factory=_no_job)


class SnapshotDesk:
    """Holds what `hold` was given until `release`, and until the file in hand is let go of."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._laid: tuple[Hashable, FileLayout | None] = (None, None)
        self._lock = threading.Lock()

    def hold(self, token: int, snapshot: Snapshot) -> None:
        """Keep `snapshot` as number `token`."""
        with self._lock:
            self._held[token] = _Held(snapshot)

    def write(self, token: int, path: Path, last: Collection[str], names: Collection[str]) -> None:
        """Begin to create `path`, of the tensors in `names`. One thing is written of a snapshot at a time.

        Raises CheckpointError while something is. Those in `last` are let go of as they are written.
        """

        def work(shard: LocalShard, job: _Job) -> WrittenFile:
            whole = {slot.name for slot in shard.layout.slots} == set(names)
            return (shard if whole else shard.some(names)).write(path, job.advance, last=last)

        self._begin(token, str(path), work)

    def place(self, token: int, places: Places, last: bool) -> None:
        """Begin to write its pieces to their places in files that are there; see Placer. As `write` otherwise."""
        self._begin(token, _where(places), lambda shard, job: shard.place(places, job.advance, last=last))

    def compare(self, token: int, places: Places) -> None:
        """Begin to look for a difference; see Placer. As `write` otherwise."""
        self._begin(token, _where(places), lambda shard, job: shard.differing(places, job.advance))

    def _begin(self, token: int, what: str, work: Callable[[LocalShard, _Job], Any]) -> None:
        with self._lock:
            held = self._find(token)
            if not held.job.now.ended:
                raise CheckpointError(f"cannot write {what}: another file of the same snapshot is being written")
            held.job = _Job()
            run = partial(self._work, token, held, held.job, what, work)
            threading.Thread(target=run, name=f"shard-{token}", daemon=True).start()

    def state(self, token: int) -> Writing:
        """Of the file that was begun last."""
        with self._lock:
            return self._find(token).job.now

    def abandon(self, token: int) -> None:
        """Stop the file in hand at its next piece; `state` says when it has been let go of."""
        with self._lock:
            self._find(token).job.abandoned = True

    def release(self, token: int) -> None:
        """Forget the snapshot, at once or when the file in hand, now abandoned, is let go of. Nothing if unknown."""
        with self._lock:
            held = self._held.pop(token, None)
            if held is None:
                return
            held.job.abandoned = True
            free = held.job.now.ended
        if free:
            held.snapshot.release()

    def _find(self, token: int) -> _Held:
        if token not in self._held:
            raise CheckpointError("cannot write a snapshot that was released")
        return self._held[token]

    def _shard(self, snapshot: Snapshot) -> LocalShard:
        """Not laid out anew where the layout is that of the snapshot before."""
        layout, laid = self._laid
        if layout is None or layout != snapshot.layout:
            laid = LocalShard(snapshot.tensors).layout
            self._laid = snapshot.layout, laid
        return LocalShard(snapshot.tensors, snapshot.written, laid)

    def _work(self, token: int, held: _Held, job: _Job, what: str, work: Callable[[LocalShard, _Job], Any]) -> None:
        value, failure = None, None
        try:
            value = work(self._shard(held.snapshot), job)
        except Exception as error:
            failure = failure_of(error)
        except BaseException as error:
            # It ends this thread and nothing else: whoever waits for the file would wait for good.
            failure = failure_of(_ended(what, error))
        with self._lock:
            job.end(value, failure)
            released = token not in self._held
        if released:
            held.snapshot.release()


def _where(places: Places) -> str:
    return ", ".join(sorted({str(place.path) for several in places.values() for place in several}))


def _ended(what: str, by: BaseException) -> CheckpointError:
    """What ends a thread must not end the driver, to whom it is sent."""
    told = CheckpointError(
        f"cannot write {what}: the thread that wrote it was ended by {type(by).__name__}; save again"
    )
    told.__cause__ = by
    return told
