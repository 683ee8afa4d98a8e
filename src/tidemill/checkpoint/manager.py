"""Saves and restores a whole run: the Checkpointer over every stateful part.

A save takes snapshots in the caller, which is cheap, and writes them behind its back. A restore takes the newest whole
checkpoint, refuses one of another model, data or algorithm, and loads every part. Random states of the process are
saved and restored as one more part. Before the first step a save and an export are tried.
"""

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from tidemill.checkpoint.catalog import clean_leftovers, newest, set_aside
from tidemill.checkpoint.changes import changes_since
from tidemill.checkpoint.commit import Committer
from tidemill.checkpoint.durable import fsync_folder, make_folder, write_durably
from tidemill.checkpoint.exports import Exports, NoExports
from tidemill.checkpoint.identity import check_identity
from tidemill.checkpoint.ranks import ranks_in_words
from tidemill.checkpoint.rehearsal import Rehearsal
from tidemill.checkpoint.retention import Measured, Retention, RetentionRule
from tidemill.checkpoint.rng import RandomState
from tidemill.checkpoint.schedule import SaveSchedule, no_epochs
from tidemill.checkpoint.staged import Staged, Stager, release_after
from tidemill.checkpoint.stored import StoredCheckpoint
from tidemill.checkpoint.writer import Writer
from tidemill.contracts.checkpoint import Snapshot, Stateful
from tidemill.contracts.events import CheckpointEvent, Emit, Notice, phase
from tidemill.contracts.footprint import Part
from tidemill.contracts.landing import Landable
from tidemill.contracts.residency import Residency, Tenant
from tidemill.contracts.state import RunState
from tidemill.errors import CheckpointError
from tidemill.faults import skipped

__all__ = ["CheckpointManager"]

_NO_EXPORTS = NoExports()
_PATIENCE = 600.0  # seconds without a byte written after which a save is given up


class CheckpointManager:
    """A Checkpointer that keeps its checkpoints in `folder`. The caller holds the run's lock."""

    def __init__(
        self,
        *,
        folder: Path,
        stateful: Sequence[Stateful],
        trainer: Tenant,
        residency: Residency,
        every: int,
        last_step: int,
        mode: str,
        keep_last: int,
        keep_every: int,
        keep_best: str = "",
        measured: Measured | None = None,
        epochs: Callable[[RunState], int] = no_epochs,
        on_failure: str,
        walk_back: bool,
        accept: Collection[str],
        identity: Mapping[str, str],
        settings: Mapping[str, Any],
        attempt: int,
        seed: int,
        grace: float,
        emit: Emit,
        patience: float = _PATIENCE,
        exports: Exports = _NO_EXPORTS,
        trial: bool = False,
        fit: Callable[[RunState], RunState] = lambda state: state,
    ) -> None:
        """Raises CheckpointError when `folder` cannot be written to.

        `every` 0 saves the last step only; `epochs` counts those that a state has behind it: where one ends is saved,
        too. `mode` is `async` or `sync`, `on_failure` `stop` or `continue`. `measured` is the number that `keep_best`
        names. `identity` says what the run is about, by name; a checkpoint that says otherwise is refused unless the
        name is in `accept`: `fit` makes a restored state one to go on from. `drain` waits `grace` seconds, not for the
        last step. `exports` are written beside saves; `trial` says whether a save and one of those are tried on disk.
        """
        self._folder = folder
        self._parts = _by_name([*stateful, RandomState()])
        self._landables = {name: part for name, part in self._parts.items() if isinstance(part, Landable)}
        self._trainer, self._residency = trainer, residency
        self._schedule, self._last_step = SaveSchedule(every=every, last_step=last_step, epochs=epochs), last_step
        self._walk_back, self._accept = walk_back, frozenset(accept)
        self._identity, self._attempt, self._seed = {**identity, "seed": str(seed)}, attempt, seed
        self._grace, self._emit, self._fit, self._exports = grace, emit, fit, exports
        self._settings, self._restored_step, self._lay_out = settings, -1, Stager()
        rule = RetentionRule(keep_last=keep_last, keep_every=keep_every, keep_best=keep_best)
        committer = self._committer(rule)
        self._rehearsal = Rehearsal(committer=committer, exports=exports, writes=trial)
        self._retention = Retention(folder, rule=rule, attempt=attempt, emit=emit, measured=measured)
        self._writer = Writer(
            commit=committer.commit,
            export=exports.beside,
            after=self._retention,
            background=mode == "async",
            stop_on_failure=on_failure == "stop",
            patience=patience,
            emit=emit,
        )
        _probe(folder)

    def _committer(self, rule: RetentionRule) -> Committer:
        return Committer(
            folder=self._folder,
            attempt=self._attempt,
            identity=self._identity,
            settings=self._settings,
            retention=rule.to_json(),
            # Of a folder once: it does not change its mind.
            tell=functools.cache(lambda text: self._emit(Notice(text=text))),
            read_again=self._exports.due,
        )

    def restore(self) -> RunState | None:
        """The state of the newest whole checkpoint, loaded into every part, with this attempt's number.

        Clears away what earlier attempts left half done, and tries a save and an export, so that a run that cannot
        save does not begin. An export that is due and was not ended is made. Raises CheckpointError.
        """
        clean_leftovers(self._folder, self._emit)
        self._exports.clear()
        stored, rejected = newest(self._folder, parts=self._parts, walk_back=self._walk_back, landables=self._landables)
        if stored is None:
            self._emit(Notice(text=f"no checkpoint in {self._folder}: starting at step 0"))
            self._rehearse(RunState.from_json(_NO_STATE))
            return None
        for item in rejected:
            text = f"{item.entry.path.name} is not whole and is passed over: {item.reason}"
            self._emit(Notice(text=text, level="warning"))
        self._check_identity(stored)
        for name, part in self._parts.items():
            part.load(replace(stored.parts[name], accept=self._accept))
        set_aside(rejected, self._attempt)
        # A crash between rename and retention leaves a whole checkpoint that was never acknowledged: it is from now on.
        fsync_folder(self._folder)
        self._retention(stored.state.step)
        self._restored_step = stored.state.step
        self._tell_restored(stored)
        saved_by = stored.manifest.attempt
        self._emit(Notice(text=f"resuming from {stored.path.name} (saved by attempt {saved_by})"))
        for text in changes_since(stored.manifest, self._settings):
            self._emit(Notice(text=text))
        state = self._fit(replace(stored.state, attempt=self._attempt, seed=self._seed))
        self._schedule.start(state)
        self._tell_ranks(stored, self._rehearse(state))
        return state

    def _tell_ranks(self, stored: StoredCheckpoint, staged: Staged) -> None:
        for part, snapshot in staged.snapshots.items():
            before, now = ranks_in_words(stored.parts[part].extra), ranks_in_words(snapshot.extra)
            if before != now:
                text = (
                    f"{part} was saved by {before}, resumed on {now}: it goes on from the same state, but sums over "
                    "ranks are taken in another order, so that numbers differ a little from here on"
                )
                self._emit(Notice(text=text))

    def _tell_restored(self, stored: StoredCheckpoint) -> None:
        """A crash between rename and acknowledgement left no word of it: from here on somebody has told of it."""
        self._emit(
            CheckpointEvent(
                time=time.time(),
                status="restored",
                step=stored.state.step,
                path=str(stored.path),
                bytes=stored.manifest.total_bytes,
            )
        )

    def save_if_due(self, state: RunState) -> None:
        """See Checkpointer. The last step is always due."""
        self._writer.surface()
        if self._schedule.is_due(state) and not self._is_saved(state):
            self._begin(state, must=state.step == self._last_step, limit=float("inf"))

    def save(self, state: RunState) -> None:
        """See Checkpointer. Its failure is raised, here or at `drain`, whatever the settings say.

        Waits `grace` seconds for a save in flight; one of this very state that failed, as it may, is made again.
        """
        if state.step == self._writer.in_flight:
            self._wait()
            self._writer.surface()
        if self._is_saved(state):
            return
        asleep = self._trainer.resident() == Part.NONE
        with nullcontext() if asleep else self._residency.awake(self._trainer):
            self._begin(state, must=True, limit=self._grace)

    def drain(self) -> None:
        """See Checkpointer. The last step's save may take as long as it makes progress, another one `grace` seconds."""
        self._wait()
        self._writer.surface()

    def _wait(self) -> None:
        last = self._writer.in_flight == self._last_step
        self._writer.wait(float("inf") if last else self._grace)

    def _is_saved(self, state: RunState) -> bool:
        saved = (self._writer.in_flight, self._writer.durable_step, self._restored_step)
        return state.step in saved and not skipped("checkpoint.saved-once")

    def _begin(self, state: RunState, *, must: bool, limit: float) -> None:
        with phase(self._emit, "save_stall", "checkpoint"):
            free = self._writer.make_way(state.step, limit, must=must)
            self._writer.surface()
            if not free:
                return
            began = time.perf_counter()
            staged = self._stage(state)
            self._emit(
                CheckpointEvent(
                    time=time.time(),
                    status="staged",
                    step=staged.step,
                    path=str(self._folder),
                    bytes=staged.total_bytes,
                    seconds=time.perf_counter() - began,
                )
            )
            self._writer.submit(staged, must=must)
        self._writer.surface()

    def _stage(self, state: RunState) -> Staged:
        taken: dict[str, Snapshot] = {}
        try:
            for name, part in self._parts.items():
                taken[name] = part.snapshot()
            return self._lay_out(state, taken)
        except BaseException as error:
            release_after(error, taken.values())
            raise

    def _rehearse(self, state: RunState) -> Staged:
        """What would be saved, tried; the snapshots in it are let go of."""
        staged = self._stage(state)
        try:
            self._rehearsal(staged)
            if state.step == self._restored_step and not self._exports.has(state.step):
                self._writer.export(staged)
        finally:
            staged.release()
        return staged

    def _check_identity(self, stored: StoredCheckpoint) -> None:
        check_identity(stored.path, stored.manifest.identity, self._identity, accept=self._accept)
        for name in sorted(set(stored.parts) - set(self._parts)):
            raise CheckpointError(
                f"cannot resume from {stored.path}: it holds the state of {name}, which this run has not; configure "
                "it again, or start another run.dir"
            )


_NO_STATE: dict[str, Any] = {"step": 0, "attempt": 0, "seed": 0, "cursor": {}, "warm_up_cursor": {}}


def _by_name(stateful: Sequence[Stateful]) -> dict[str, Stateful]:
    parts: dict[str, Stateful] = {}
    for part in stateful:
        if not part.name.isidentifier() or not part.name.isascii():
            raise CheckpointError(f"cannot save a part named {part.name!r}: use letters, digits and _")
        if part.name in parts:
            raise CheckpointError(f"cannot save two parts named {part.name!r}: rename one")
        parts[part.name] = part
    return parts


def _probe(folder: Path) -> None:
    """Try what every save does: create, write, fsync, rename, remove."""
    probe, renamed = folder / "probe.tmp", folder / "probe.renamed.tmp"
    try:
        make_folder(folder)
        probe.unlink(missing_ok=True)
        write_durably(probe, b"tidemill", fault="checkpoint.probe", fsync_fault="checkpoint.fsync-probe")
        probe.rename(renamed)
        fsync_folder(folder)
        renamed.unlink()
    except OSError as error:
        raise CheckpointError(
            f"cannot keep checkpoints in {folder}: {error}; make the folder writable, or choose another run.dir"
        ) from error
