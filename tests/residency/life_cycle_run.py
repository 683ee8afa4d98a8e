"""A whole run as the life cycle sees it: real savers of two ranks, real leases, real checkpoints, on a disk that loses
what was not synced. What may happen are methods; what must hold are the invariants I1 to I12.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.residency.life_cycle_invariants import WHOLE, check_memory, check_unchanged
from tests.residency.life_cycle_settings import NEVER, Settings
from tests.residency.life_cycle_tenants import RankedTenant, Version, make_saver
from tests.residency.life_cycle_writer import StepwiseWriter

from tidemill.checkpoint.attempts import next_attempt
from tidemill.contracts.checkpoint import Snapshot
from tidemill.contracts.events import CheckpointEvent, Event
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Moved
from tidemill.contracts.state import Cursor, RunState
from tidemill.errors import CheckpointError, ResidencyError
from tidemill.residency.manager import LeaseManager
from tidemill.testing.volatile_disk import Choose, PowerCut, VolatileDisk

__all__ = ["Life"]

RANKS = 2
STATE = 5120


@dataclass(frozen=True)
class Saving:
    """A save in the background: what it writes, and how many events there were before it."""

    version: Version
    held: list[Snapshot]
    events: int


class Life:
    """A run and its restarts. `base` is an empty folder for what the disk keeps, one folder a start."""

    def __init__(self, base: Path, settings: Settings) -> None:
        self.settings = settings
        self._places = (base / str(number) for number in itertools.count())
        self._closing = contextlib.ExitStack()
        self.silent: set[int] = set()
        self.acknowledged = 0
        self.attempt = 0
        folder = next(self._places)
        folder.mkdir()
        self._start(folder)

    # Starts

    def _start(self, folder: Path, *, cut: int = NEVER) -> None:
        """As the program starts; the power is cut after `cut` operations more."""
        self.events: list[CheckpointEvent] = []
        self.on_disk: set[int] = set()
        self.saving: Saving | None = None
        self.writer = StepwiseWriter()
        self.disk = self._closing.enter_context(VolatileDisk(folder, before=self.writer.before))
        self.folder = folder / "checkpoints"
        self.disk.cut(after=cut)
        before, self.attempt = self.attempt, next_attempt(folder)
        assert self.attempt > before, "I9 an attempt has the number of an earlier one"
        spares = STATE // RANKS if self.settings.many_spares else 2 * 512
        self.trainer = RankedTenant("trainer", partial(make_saver, spares), ranks=RANKS, attempt=self.attempt)
        self.trainer.silent = self.silent
        self.engine = RankedTenant("engine", make_saver, ranks=1)
        self.residency = LeaseManager(budget=STATE + 1024, emit=lambda event: None, deadline=0.01)
        self.manager = self.settings.manager(
            self.folder, self.trainer, self.residency, attempt=self.attempt, emit=self._hear
        )
        with self.residency.awake(self.trainer):
            self._restore()
        self.disk.cut(after=NEVER)

    def _hear(self, event: Event) -> None:
        if not isinstance(event, CheckpointEvent):
            return
        self.events.append(event)
        if event.status in ("durable", "restored"):
            self.acknowledged = max(self.acknowledged, event.step)
            self.on_disk.add(event.step)
        if event.status == "pruned":
            self.on_disk.discard(event.step)

    def _restore(self) -> None:
        acknowledged = self.acknowledged
        try:
            state = self.manager.restore()
        except CheckpointError as error:
            raise AssertionError(f"I10 step {acknowledged} is acknowledged, nothing restored: {error}") from error
        self.state = state or RunState(step=0, attempt=self.attempt, seed=1, cursor=Cursor(), warm_up_cursor=Cursor())
        step = self.state.step
        assert step >= acknowledged, f"I10 step {acknowledged} was acknowledged and {step} is restored"
        assert self.trainer.version.step == step, "I9 what is restored is not of the step that it says"
        assert self.trainer.contents() == self.trainer.expected(), "I9 what is restored is not one version"
        self.on_disk = {int(path.name.removeprefix("step-")) for path in self.folder.iterdir() if "." not in path.name}
        if self.settings.background:
            self.writer.hold()

    def crash(self, choose: Choose, *, again: int | None = None) -> None:
        """Power cut; and once more after `again` operations of the start."""
        self.lose_power()
        while True:
            folder = next(self._places)
            self.disk.leave(folder, choose)
            self._closing.close()
            try:
                self._start(folder, cut=NEVER if again is None else again)
                return
            except PowerCut:
                again = None

    def lose_power(self) -> None:
        """Nothing is done on the disk any more; a writer that was at work ends."""
        self.disk.cut()
        while self.saving is not None:
            self.advance(1)

    # What may happen

    def use(self) -> None:
        """A lease, twice as deep."""
        with self._trainer_lease(), self.residency.awake(self.trainer):
            pass

    def train(self, *, cut: int | None = None) -> None:
        """One step, saved when it is due; when the save is made at once, the power may be cut in it."""
        due = self.state.step % 2 == 1
        if due:
            self.finish()
        with self._trainer_lease():
            self.trainer.step(self.attempt)
            self.state = self.state.advance()
            if due:
                self._save(lambda: self.manager.save_if_due(self.state), cut)
            self._check_awake("I1")

    def train_to_save(self, *, cut: int | None = None) -> None:
        """Steps until a save is due and made, or begun."""
        if self.state.step % 2 == 0:
            self.train()
        self.train(cut=cut)

    def save(self) -> None:
        """Asked for between two steps, awake or asleep; nothing when this step is saved already."""
        self.finish()
        if self.trainer.resident() == Part.NONE:
            self._save(lambda: self.manager.save(self.state))
            return
        with self._trainer_lease():
            self._save(lambda: self.manager.save(self.state))

    def _save(self, begin: Callable[[], None], cut: int | None = None) -> None:
        before = len(self.events)
        if cut is not None and not self.settings.background:
            self.disk.cut(after=cut)
        try:
            begin()
        except CheckpointError:
            assert self._has_failed(before), "a save failed without a word"
        begun = any(event.status == "staged" for event in self.events[before:])
        if begun and self.settings.background:
            self.saving = Saving(self.trainer.version, self.trainer.held, before)
            self.writer.follow()
        elif begun:
            self._check_saved(before)
        if cut is not None:
            self.disk.cut(after=NEVER)

    def _has_failed(self, before: int) -> bool:
        return any(event.status == "failed" for event in self.events[before:])

    def advance(self, operations: int) -> None:
        """The writer makes so many operations, or all that are left."""
        if self.saving is None or not self.writer.go(operations):
            return
        saving, self.saving = self.saving, None
        if self.disk.is_dead:
            return
        try:
            self.manager.drain()
        except CheckpointError:
            assert self._has_failed(saving.events), "a save failed without a word"
        self._check_saved(saving.events)

    def advance_to(self, operation: str) -> None:
        """The writer makes all before the next one that begins with these words."""
        self.advance(1)
        while self.saving is not None and not self.writer.at.startswith(operation):
            self.advance(1)

    def finish(self) -> None:
        """The writer makes all that are left."""
        while self.saving is not None:
            self.advance(1)

    def fail(self, after: int) -> None:
        """The disk fails once, `after` operations further into a save."""
        self.writer.fail(after)
        if self.saving is None:
            self.train_to_save()
        self.finish()
        self.writer.never_fail()

    def generate(self) -> None:
        """The engine's turn: the trainer must sleep. Where the writer keeps all spare pages, it goes on first."""
        while True:
            try:
                with self.residency.awake(self.engine):
                    assert self.engine.contents() == self.engine.expected(), "I11 the engine's weights differ"
                    self.check()
                return
            except ResidencyError as error:
                if self.saving is None or "still read by" not in str(error):
                    raise
                self.check()
                self.advance(3)

    def write_in_other_order(self) -> None:
        """The files of later saves are written the other way round."""
        self.trainer.written_last_first = not self.trainer.written_last_first

    def sleep_again(self) -> None:
        """What is done is not done twice."""
        self.generate()
        assert self.trainer.sleep() == Moved(), "I12 a second sleep copies"
        with self._trainer_lease():
            assert self.trainer.wake_up(Part.ALL) == Moved(), "I12 a second wake copies"

    def save_again(self) -> None:
        """What is saved is not saved twice."""
        self.save()
        self.finish()
        if self.state.step not in self.on_disk:
            return  # the disk failed
        before = len(self.events)
        self.save()
        self.finish()
        assert len(self.events) == before, "I12 a second save of one step writes again"

    # What must hold

    @contextlib.contextmanager
    def _trainer_lease(self) -> Iterator[None]:
        was_asleep = self.trainer.resident() != WHOLE
        assert not was_asleep or self.trainer.sealed(), "I8 wake would read pages that are not of the last version"
        with self.residency.awake(self.trainer):
            self._check_awake("I11" if was_asleep else "I1")
            yield

    def _check_awake(self, invariant: str) -> None:
        same = self.trainer.contents() == self.trainer.expected()
        assert same, f"{invariant} the device does not hold the version that was trained"

    def _check_saved(self, before: int) -> None:
        """After a save that was acknowledged, or that failed."""
        status = [event.status for event in self.events[before:] if event.status in ("durable", "failed")]
        names = {path.name for path in self.folder.iterdir()}
        left = sorted(name for name in names if name.endswith(".tmp"))
        assert not left, f"I12 a save that {status} leaves {left}"
        there = {int(name.removeprefix("step-")) for name in names if "." not in name}
        newest = {self.acknowledged} - {0}
        assert newest <= there <= self.on_disk, f"I10 {there} lie on the disk, of {self.on_disk} acknowledged"
        self.on_disk = there
        if status == ["durable"] and not self.writer.has_failed:
            assert len(there) <= self.settings.keep_last, "I10 what need not stay is not pruned"

    def check(self) -> None:
        """All that holds between any two moves."""
        for tenant in (self.trainer, self.engine):
            check_memory(tenant)
        total = self.trainer.device_bytes() + self.engine.device_bytes()
        assert total <= STATE + 1024, "I4 the budget is exceeded"
        if self.saving is None:
            assert self.trainer.references() == 0, "I5 references without a save"
        else:
            check_unchanged(self.saving.held, self.saving.version)

    def end(self) -> None:
        """Whatever happened, it goes on."""
        self.finish()
        self.generate()
        self.use()
        self.check()
        self.close()

    def close(self) -> None:
        """The run's threads and files end."""
        if self.saving is not None:
            self.lose_power()
        self._closing.close()
