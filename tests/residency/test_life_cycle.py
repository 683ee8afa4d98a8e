"""The invariants of the life cycle's memory, against the real leases and the real saver: by Hypothesis and by walks.

The harness is tested too: savers with one fault each must be caught by it. The whole life cycle, with checkpoints and
the disk, is in test_life_cycle_of_a_run.
"""

from collections.abc import Hashable

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from tests.residency.life_cycle_memory import PAGE, SPARE, MemoryMachine, walk

from tidemill.contracts.checkpoint import Snapshot
from tidemill.contracts.footprint import Part
from tidemill.residency.savers.crossing import Captured, Outgoing
from tidemill.residency.savers.host_arena import HostArenaSaver


def test_the_invariants_hold_in_what_hypothesis_finds() -> None:
    run_state_machine_as_test(
        MemoryMachine,
        settings=settings(
            max_examples=150,
            stateful_step_count=25,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("first", range(0, 240, 80))
def test_the_invariants_hold_in_random_walks(first: int) -> None:
    for seed in range(first, first + 80):
        walk(seed)


# The harness is tested: each of these savers is wrong in one way


class OverwritesReferencedPages(HostArenaSaver):
    """No copy-on-write."""

    def freeze(self) -> None:
        super().freeze()
        self._arena.writable = lambda place: present(self, *place)  # type: ignore[method-assign]


def present(saver: HostArenaSaver, slab: int, number: int) -> torch.Tensor:
    """What the table says, whoever reads it."""
    run = saver._arena.run(slab)
    start = run.pages[number].start
    return run.memory[start : start + run.pages[number].bytes]


class FreesPagesOnWake(HostArenaSaver):
    """Pages are forgotten as soon as they were read back, though the seal stays."""

    def restore(self, part: Part = Part.ALL, *, wait: bool = True) -> int:
        copied = super().restore(part, wait=wait)
        for index in range(len(self._crossing.slabs)):
            for _, page in self._arena.run(index).stretches():
                page.zero_()
        return copied


class UnmapsBeforeCopying(HostArenaSaver):
    """What was on the device is gone when the copy begins."""

    def capture(self, key: Hashable) -> Captured:
        if self._sealed != key:
            for slab in self._crossing.slabs:
                if slab.memory.resident:
                    slab.memory.free()
                    slab.memory.allocate()
                    slab.memory.flat.zero_()
        return super().capture(key)


class SealsBeforeTheCopiesAreDone(HostArenaSaver):
    """The last slab is on its way when the seal is set."""

    def freeze(self) -> None:
        super().freeze()
        out, last = self._crossing.out, len(self._crossing.slabs) - 1
        forgotten = Outgoing(last, lambda: None, [])
        self._crossing.out = lambda number: forgotten if number == last else out(number)  # type: ignore[method-assign]


class ForgetsLateState(HostArenaSaver):
    """One tensor of the optimizer never came into the ledger."""

    def add(self, name: str, tensor: torch.Tensor, part: Part) -> None:
        if name != "m1":
            super().add(name, tensor, part)


class LeaksReferences(HostArenaSaver):
    """A finished save does not give its pages up."""

    def snapshot(self) -> Snapshot:
        held = super().snapshot()
        return Snapshot(tensors=held.tensors)


class LeavesAPartlyWokenTenant(HostArenaSaver):
    """No roll-back when memory runs out half-way."""

    def freeze(self) -> None:
        super().freeze()
        self._crossing.undo = lambda brought: None  # type: ignore[method-assign]


class StaleSeal(HostArenaSaver):
    """Believes itself sealed whatever changed since."""

    def capture(self, key: Hashable) -> Captured:
        captured = super().capture(key) if self._sealed is None else Captured()
        self._sealed = key
        return captured


@pytest.mark.parametrize(
    ("broken", "invariants"),
    [
        (OverwritesReferencedPages, "I3"),
        (FreesPagesOnWake, "I1|I2|I11"),
        (UnmapsBeforeCopying, "I2|I11"),
        (SealsBeforeTheCopiesAreDone, "I2"),
        (ForgetsLateState, "I2"),
        (LeaksReferences, "I5"),
        (LeavesAPartlyWokenTenant, "I1|I4|I11"),
        (StaleSeal, "I2|I11"),
    ],
)
def test_a_saver_with_a_fault_is_caught(broken: type[HostArenaSaver], invariants: str) -> None:
    with pytest.raises(AssertionError, match=f"^({invariants}) "):
        for seed in range(100):
            walk(seed, lambda: broken(device="cpu", page_bytes=PAGE, spare_bytes=SPARE, pin=False))
