"""Snapshots of one rank that the driver knows by number, and the threads that write them.

Every method may be called from any thread, and none waits for a writer: what the rank does meanwhile, waking or
stepping, never stands behind a disk.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.checkpoint.shard import LocalShard
from tidemill.cluster.worker import Failure, failure_of
from tidemill.contracts.checkpoint import Snapshot
from tidemill.errors import CheckpointError

__all__ = ["SnapshotDesk", "Writing"]


@dataclass(frozen=True, kw_only=True)
class Writing:
    """How far a file is. `sums` are the pieces' checksums, once it is durable."""

    written: int
    ended: bool
    sums: Mapping[str, str]
    failure: Failure | None


class _Abandoned(Exception):
    """Raised inside a writing that nobody waits for any more."""


class _Job:
    """One file being written; `abandoned` stops it at its next piece."""

    def __init__(self) -> None:
        self.abandoned = False
        self.now = Writing(written=0, ended=False, sums={}, failure=None)

    def advance(self, count: int) -> None:
        if self.abandoned:
            raise _Abandoned("the driver waits for this file no more")
        self.now = Writing(written=self.now.written + count, ended=False, sums={}, failure=None)

    def end(self, sums: Mapping[str, str], failure: Failure | None) -> None:
        self.now = Writing(written=self.now.written, ended=True, sums=sums, failure=failure)


def _no_job() -> _Job:
    job = _Job()
    job.end({}, None)
    return job


@dataclass
class _Held:
    snapshot: Snapshot
    job: _Job = field(default_factory=_no_job)


class SnapshotDesk:
    """Holds what `hold` was given until `release`, and until the file in hand is let go of."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._lock = threading.Lock()

    def hold(self, token: int, snapshot: Snapshot) -> None:
        """Keep `snapshot` as number `token`."""
        with self._lock:
            self._held[token] = _Held(snapshot)

    def write(self, token: int, path: Path, last: bool) -> None:
        """Begin to create `path`. Raises CheckpointError while another file of this snapshot is being written.

        `last`: there will be no other file of it, and each piece is let go of as it is written.
        """
        with self._lock:
            held = self._find(token)
            if not held.job.now.ended:
                raise CheckpointError(f"cannot write {path}: another file of the same snapshot is being written")
            held.job = _Job()
            thread = threading.Thread(
                target=self._write, args=(token, held, held.job, path, last), name=f"shard-{token}", daemon=True
            )
            thread.start()

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

    def _write(self, token: int, held: _Held, job: _Job, path: Path, last: bool) -> None:
        sums: Mapping[str, str] = {}
        failure = None
        try:
            sums = LocalShard(held.snapshot.tensors, held.snapshot.written).write(path, job.advance, last=last)
        except Exception as error:
            failure = failure_of(error)
        except BaseException as error:
            # It ends this thread and nothing else: whoever waits for the file would wait for good.
            failure = failure_of(_ended(path, error))
        with self._lock:
            job.end(sums, failure)
            released = token not in self._held
        if released:
            held.snapshot.release()


def _ended(path: Path, by: BaseException) -> CheckpointError:
    """What ends a thread must not end the driver, to whom it is sent."""
    told = CheckpointError(
        f"cannot write {path}: the thread that wrote it was ended by {type(by).__name__}; save again"
    )
    told.__cause__ = by
    return told
