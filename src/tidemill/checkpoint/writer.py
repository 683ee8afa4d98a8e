"""Writing behind the run's back, one checkpoint at a time, with nothing lost on the way back.

`submit` returns when the writing has begun (`mode` "async") or ended ("sync"). A failure is emitted when it happens
and kept until the next call of `surface`, which raises it when it must stop the run. Every wait ends: when the writer
makes no progress, or when its time is over, the save is abandoned and left uncommitted. One whose thread lives on
nevertheless, in a disk that does not answer, stays the only one: nothing is written beside it.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tidemill.checkpoint.staged import Staged, release_after
from tidemill.contracts.events import CheckpointEvent, Emit, Notice, PhaseDone, Progress
from tidemill.errors import CheckpointError
from tidemill.faults import skipped
from tidemill.units import format_seconds

__all__ = ["Writer"]

_LOOK = 0.05  # seconds between looks at a writer that is waited for
_GOES_ON = "the run goes on because checkpoint.on_failure is continue"
_LET_GO = 12.0  # seconds more, where the next save needs the place: a rank is given ten to let go of a file
_NOTICE_ABANDON = 2.0  # seconds for a writer that still lives to clear its attempt away


class _Abandoned(Exception):
    """Raised inside a save that nobody waits for any more."""


@dataclass
class _Job:
    staged: Staged
    must: bool
    done: int = 0
    abandoned: bool = False

    def advance(self, count: int) -> None:
        if self.abandoned:
            raise _Abandoned("nobody waits for this save any more")
        self.done += count


class Writer:
    """At most one save in flight. `commit(staged, advance)` writes it; once it is durable, `export(staged, advance)`
    may read the snapshots again, and then, when they are let go of, `after(step)` runs."""

    def __init__(
        self,
        *,
        commit: Callable[[Staged, Callable[[int], None]], Path],
        export: Callable[[Staged, Callable[[int], None]], None] = lambda staged, advance: None,
        after: Callable[[int], object],
        background: bool,
        stop_on_failure: bool,
        patience: float,
        emit: Emit,
    ) -> None:
        """`patience` is how many seconds a save may make no progress before a wait for it is given up."""
        self._commit = commit
        self._export = export
        self._after = after
        self._background = background
        self._stop = stop_on_failure
        self._patience = patience
        self._emit = emit
        self._thread = threading.Thread()
        self._start = threading.Lock()
        self._job: _Job | None = None
        self._failure: CheckpointError | None = None
        self.durable_step = -1

    @property
    def in_flight(self) -> int:
        """The step being written, or -1; one that was abandoned will not be durable and does not count."""
        job = self._job
        return job.staged.step if job is not None and not job.abandoned else -1

    def submit(self, staged: Staged, *, must: bool) -> None:
        """Write `staged`, after the save before it. `must`: its failure stops the run whatever the settings say.

        Raises CheckpointError, and lets go of `staged`, when an abandoned save, or what follows it, still lives.
        """
        job = _Job(staged, must)
        if not self._background:
            self._job = job
            self._write(job)
            return
        try:
            self.wait()
            self._check_free(staged.step)
        except BaseException as error:
            release_after(error, staged.snapshots.values())
            raise
        self._job = job
        self._thread = threading.Thread(target=self._write_later, args=(job,), name="checkpoint-writer", daemon=True)
        # Who starts a thread waits for a sign of it, and then for Python, which the thread would go on to hold.
        with self._start:
            self._thread.start()

    def make_way(self, step: int, limit: float, *, must: bool) -> bool:
        """As `wait`, before `step` is submitted. False, with a warning, when it has to be left out since an abandoned
        save still lives; that raises CheckpointError when it is a `must`, or failures stop the run."""
        try:
            self.wait(limit)
            self._check_free(step)
        except CheckpointError as error:
            if self._stop or must:
                raise
            reason = f"step {step} is not saved: {error}"
            self._emit(CheckpointEvent(time=time.time(), status="failed", step=step, path="", reason=reason))
            self._emit(Notice(text=f"{reason}; {_GOES_ON}", level="warning"))
            return False
        return True

    def _check_free(self, step: int) -> None:
        if self._job is not None:
            self._thread.join(_LET_GO)
        if (job := self._job) is not None:
            raise CheckpointError(
                f"cannot save step {step}: step {job.staged.step} is saved, but its export or the clearing of older "
                "checkpoints does not end; look at the disk"
            )

    def wait(self, limit: float = float("inf")) -> None:
        """Until no save is in flight. Abandons it after `limit` seconds, or `patience` seconds without progress.

        Raises CheckpointError when it was abandoned, but for one that is durable: what follows it is left alone then.
        """
        job = self._job
        if job is None:
            return
        began = moved = time.monotonic()
        done = job.done
        while self._thread.is_alive():
            self._thread.join(_LOOK)
            now = time.monotonic()
            if job.done != done:
                done, moved = job.done, now
            if job.abandoned or now - began > limit or now - moved > self._patience:
                self._abandon(job, now - began)
                return

    def surface(self) -> None:
        """Raise what went wrong in the background, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _abandon(self, job: _Job, waited: float) -> None:
        """The job stays ours until its thread ends: a second one beside it would write into the same folders."""
        job.abandoned = True
        self._thread.join(_NOTICE_ABANDON)
        if self.durable_step == job.staged.step:
            if self._job is job:
                text = "its export or the clearing of older checkpoints does not end, and is waited for no longer"
                self._emit(Notice(text=f"step {job.staged.step} is saved, but {text}", level="warning"))
            return
        self._failure = None
        raise CheckpointError(
            f"cannot wait longer for the save of step {job.staged.step}: it is not durable after "
            f"{format_seconds(waited)} ({job.done} of {job.staged.total_bytes} bytes written) and is left uncommitted; "
            f"earlier checkpoints are untouched: raise checkpoint.grace, or look at the disk"
        )

    def _write_later(self, job: _Job) -> None:
        with self._start:
            pass
        self._write(job)

    def _write(self, job: _Job) -> None:
        try:
            self._save(job)
        finally:
            if self._job is job:
                self._job = None

    def _save(self, job: _Job) -> None:
        start, began = time.time(), time.perf_counter()
        staged = job.staged
        try:
            path = self._commit(staged, self._advance(job))
            self.durable_step = staged.step
            seconds = time.perf_counter() - began
            self._emit(PhaseDone(name="save_durable", start=start, seconds=seconds, owner="checkpoint"))
            self._emit(
                CheckpointEvent(
                    time=time.time(),
                    status="durable",
                    step=staged.step,
                    path=str(path),
                    bytes=staged.total_bytes,
                    seconds=seconds,
                )
            )
        except BaseException as error:
            failure = self._failed(job, error)
            if left := self._let_go(staged):
                failure.add_note(left)
            if not isinstance(error, Exception) and not self._background:
                raise
        else:
            try:
                self._export_beside(job)
            finally:
                self._tidy(staged)

    def export(self, staged: Staged) -> None:
        """Export `staged`, which is durable already, at once; it stays the caller's. Raises CheckpointError when its
        failure must stop the run."""
        self._export_beside(_Job(staged, must=False))
        self.surface()

    def _export_beside(self, job: _Job) -> None:
        """What fails here costs the checkpoint nothing: it is durable."""
        try:
            self._export(job.staged, job.advance)
        except Exception as error:
            text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            text = f"step {job.staged.step} is saved, but not exported: {text}"
            if self._stop and not job.abandoned:
                self._failure = CheckpointError(text)
                self._failure.__cause__ = error
                return
            self._emit(Notice(text=text, level="warning"))

    def _let_go(self, staged: Staged) -> str:
        """Release the snapshots. Says what could not be released, which changes nothing of what became of the save."""
        try:
            if not skipped("checkpoint.let-go"):
                staged.release()
        except Exception as error:
            text = f"what was copied for the save of step {staged.step} could not all be released: {error!r}"
            self._emit(Notice(text=text, level="warning"))
            return text
        return ""

    def _tidy(self, staged: Staged) -> None:
        self._let_go(staged)
        try:
            self._after(staged.step)
        except Exception as error:
            text = f"step {staged.step} is saved, but the clearing of older checkpoints failed: {error!r}"
            self._emit(Notice(text=text, level="warning"))

    def _advance(self, job: _Job) -> Callable[[int], None]:
        def advance(count: int) -> None:
            job.advance(count)
            self._emit(Progress(what="saving", done=job.done, total=job.staged.total_bytes))

        return advance

    def _failed(self, job: _Job, error: BaseException) -> CheckpointError:
        step = job.staged.step
        if isinstance(error, CheckpointError):
            failure = error
        else:
            failure = CheckpointError(f"cannot save step {step}: {type(error).__name__}: {error}")
            failure.__cause__ = error
        self._emit(CheckpointEvent(time=time.time(), status="failed", step=step, path="", reason=str(failure)))
        if job.abandoned:
            return failure
        if self._stop or job.must:
            self._failure = failure
            return failure
        self._emit(Notice(text=f"{failure}; {_GOES_ON}", level="warning"))
        return failure
