"""A trainer's memory without its arithmetic, and a guest on the same device, under leases as a run has them."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.offload.cases import Case, fingerprint, make
from benchmarks.trainers import DEADLINE
from tidemill.checkpoint.manager import CheckpointManager
from tidemill.contracts.checkpoint import Saved, Snapshot
from tidemill.contracts.events import Event, PhaseDone, Transition
from tidemill.contracts.footprint import Part
from tidemill.contracts.landing import Landing
from tidemill.contracts.residency import Gate, Moved
from tidemill.contracts.state import Cursor, RunState
from tidemill.residency.gate import TenantGate
from tidemill.residency.manager import LeaseManager
from tidemill.residency.savers.host_arena import HostArenaSaver
from tidemill.residency.savers.promised import Promises
from tidemill.units import MIB

__all__ = ["Guest", "House", "Sleeper", "make_manager", "run_state"]


class Sleeper:
    """Tenant and Stateful over a saver: what `FsdpTrainer` does with its memory, for tensors of any shape."""

    name = "trainer"

    def __init__(self, case: Case) -> None:
        self.gate: Gate = TenantGate(self.name)
        self.memory = make(case)
        self.version = 0
        self.load_seconds = self.settled = 0.0
        # Of a small state, too, the spare pages shall be a tenth.
        page_bytes = min(64 * MIB, max(MIB, case.size // 64))
        self.saver = HostArenaSaver(
            device=case.device, page_bytes=page_bytes, pin=case.device == "cuda", deadline=DEADLINE
        )
        self.tensors = {f"model/{number:05d}": tensor for number, tensor in enumerate(self.memory.tensors)}
        for name, tensor in self.tensors.items():
            self.saver.add(name, tensor, Part.WEIGHTS)
        self.saver.freeze()
        self._promises = Promises(self.saver)
        self._copies_beside = case.device != "cpu"

    def resident(self) -> Part:
        """By the ledger."""
        return self.saver.resident_part()

    def footprint(self, part: Part) -> int:
        """By the ledger."""
        return self.saver.device_bytes(part)

    def host_bytes(self) -> int:
        """Of the host pages."""
        return self.saver.host_bytes()

    def wake_up(self, part: Part) -> Moved:
        """All of it."""
        return Moved(copied=self.saver.restore(part))

    def sleep(self) -> Moved:
        """Copy what is not in the pages, and free."""
        captured = self.saver.capture(self.version)
        self.saver.release(self.version)
        return Moved(copied=captured.copied, beside=captured.beside, waited=captured.waited)

    def change(self) -> None:
        """A step: contents are others. What was marked for a save has its copy before."""
        self.gate.check(Part.ALL, "change")
        self.settle()
        self.memory.change()
        self.version += 1

    def settle(self) -> None:
        """Wait for copies of what was marked; the wait is told."""
        began = time.perf_counter()
        self._promises.settle()
        self.settled += time.perf_counter() - began

    def snapshot(self) -> Snapshot:
        """Mark the present contents; where a copy of them goes on by itself, it is begun."""
        kept = self._promises.snapshot(self.version)
        if self.saver.sealed_key != self.version:
            self.gate.check(Part.ALL, "snapshot")
            if self._copies_beside:
                self.saver.begin_capture(self.version)
        return replace(kept, extra={"version": self.version})

    def landing(self) -> Landing:
        """As the saver's."""
        self.gate.check(Part.ALL, "load")
        self.settle()
        return self.saver.landing()

    def load(self, saved: Saved) -> None:
        """Strict as the saver is."""
        self.gate.check(Part.ALL, "load")
        self.settle()
        began = time.perf_counter()
        self.saver.load(saved.tensors, key=self.version + 1, landing=saved.landing)
        self.load_seconds = time.perf_counter() - began
        self.version += 1

    def fingerprint(self) -> list[int]:
        """Of all contents, awake."""
        return fingerprint(self.memory.tensors)


class Guest:
    """An engine that needs the whole device and does nothing: its lease puts the trainer to sleep."""

    name = "engine"

    def __init__(self, size: int) -> None:
        self.gate: Gate = TenantGate(self.name)
        self._size = size
        self._resident = Part.NONE

    def resident(self) -> Part:
        """What it was asked to be."""
        return self._resident

    def footprint(self, part: Part) -> int:
        """All is cache."""
        return self._size if Part.KV_CACHE in part else 0

    def host_bytes(self) -> int:
        """None."""
        return 0

    def wake_up(self, part: Part) -> Moved:
        """At once."""
        self._resident |= part & Part.KV_CACHE
        return Moved()

    def sleep(self) -> Moved:
        """At once."""
        self._resident = Part.NONE
        return Moved()


class House:
    """Trainer, guest and leases. `note` is for all that emit."""

    def __init__(self, case: Case) -> None:
        self.trainer = Sleeper(case)
        size = self.trainer.footprint(Part.ALL)
        self.engine = Guest(size)
        self.residency = LeaseManager(budget=size, emit=self.note, deadline=DEADLINE)
        self.residency.admit(self.trainer)
        self._waited = 0.0

    def note(self, event: Event) -> None:
        """Add up what is said to be waited for because of a save."""
        if isinstance(event, Transition):
            self._waited += event.waited
        elif isinstance(event, PhaseDone) and event.name == "save_stall":
            self._waited += event.seconds

    def reported(self) -> float:
        """Seconds until now in which somebody said that the loop waited because of a save: calls, sleeps, changes."""
        return self._waited + self.trainer.settled

    def close(self) -> None:
        """No lease from now on, and nothing pinned."""
        self.residency.close()
        self.trainer.saver.close()


def make_manager(folder: Path, house: House, emit: Callable[[Event], None]) -> CheckpointManager:
    """Every step is due, the newest is kept."""
    return CheckpointManager(
        folder=folder,
        stateful=(house.trainer,),
        trainer=house.trainer,
        residency=house.residency,
        every=1,
        last_step=1_000_000,
        mode="async",
        keep_last=1,
        keep_every=0,
        on_failure="stop",
        walk_back=False,
        accept=(),
        identity={},
        settings={},
        attempt=1,
        seed=0,
        grace=DEADLINE,
        emit=emit,
    )


def run_state(step: int) -> RunState:
    """After so many steps."""
    return RunState(step=step, attempt=1, seed=0, cursor=Cursor(position=step), warm_up_cursor=Cursor())
