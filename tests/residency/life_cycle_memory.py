"""Two tenants' memory as the life cycle sees it: real savers of which one's state fits at a time, real leases, readers
that keep snapshots for long. What may happen are methods, by rules and by dice; what must hold are the invariants.
"""

import random
from collections.abc import Callable, Generator

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.residency.life_cycle_tenants import PAGE, Contents, as_bytes

from tidemill import faults
from tidemill.contracts.checkpoint import Snapshot
from tidemill.contracts.events import ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Moved
from tidemill.errors import ResidencyError
from tidemill.residency.gate import TenantGate
from tidemill.residency.manager import LeaseManager
from tidemill.residency.savers.host_arena import HostArenaSaver

__all__ = ["PAGE", "SPARE", "MemoryMachine", "sound", "walk"]

SPARE = 20 * PAGE  # four versions: walks of one thread never wait for a reader
MakeSaver = Callable[[], HostArenaSaver]


def sound() -> HostArenaSaver:
    return HostArenaSaver(device="cpu", page_bytes=PAGE, spare_bytes=SPARE, pin=False)


class SaverTenant:
    """A trainer reduced to its memory: tensors that a step changes, and a version that it raises."""

    def __init__(self, name: str, saver: HostArenaSaver) -> None:
        self.name = name
        self.gate = TenantGate(name)
        self.saver = saver
        self.version = 0
        self.tensors = {f"w{i}": torch.full((60,), float(i)) for i in range(3)}
        self.tensors |= {f"m{i}": torch.full((60,), float(-i)) for i in range(2)}
        for key, tensor in self.tensors.items():
            saver.add(key, tensor, Part.WEIGHTS if key.startswith("w") else Part.OPTIMIZER)
        saver.freeze()
        self.sleep()

    def resident(self) -> Part:
        return self.saver.resident_part()

    def footprint(self, part: Part) -> int:
        return self.saver.device_bytes(part)

    def host_bytes(self) -> int:
        return self.saver.host_bytes()

    def wake_up(self, part: Part) -> Moved:
        return Moved(copied=self.saver.restore(part))

    def sleep(self) -> Moved:
        captured = self.saver.capture(self.version)
        self.saver.release(self.version)
        return Moved(copied=captured.copied, waited=captured.waited)

    def leave(self) -> Generator[int, None, Moved]:
        captured = yield from self.saver.leave(self.version)
        return Moved(copied=captured.copied, waited=captured.waited)

    def arrive(self, part: Part) -> Generator[int, None, Moved]:
        copied = yield from self.saver.arrive(part)
        return Moved(copied=copied)

    def step(self) -> None:
        self.gate.check(Part.ALL, "step")
        self.version += 1
        for tensor in self.tensors.values():
            tensor.mul_(1.5).add_(self.version)

    def snapshot(self) -> Snapshot:
        if self.saver.sealed_key != self.version:
            self.gate.check(Part.ALL, "snapshot")
            self.saver.capture(self.version)
        return self.saver.snapshot()

    def contents(self) -> Contents:
        return as_bytes(self.tensors)

    @property
    def device_bytes(self) -> int:
        """What is really allocated, whatever the tenant says."""
        storages = {id(slab): slab.memory.flat.untyped_storage().nbytes() for slab in self.saver._crossing.slabs}
        return sum(storages.values())


class Harness:
    """Two tenants of which one fits at a time, and what each must hold."""

    def __init__(self, make_saver: MakeSaver = sound) -> None:
        self.tenants = [SaverTenant("trainer", make_saver()), SaverTenant("critic", make_saver())]
        self.state = self.tenants[0].footprint(Part.ALL)
        self.budget = self.state + self.tenants[0].footprint(Part.WEIGHTS)
        self.residency = LeaseManager(budget=self.budget, emit=ignore, deadline=0.01)
        self.expected: list[Contents] = []
        for tenant in self.tenants:
            with self.residency.awake(tenant):
                self.expected.append(tenant.contents())
        self.held: list[tuple[int, Snapshot, Contents]] = []

    # What may happen

    def use(self, which: int) -> None:
        tenant = self.tenants[which]
        with self.residency.awake(tenant):
            self.check_awake(which)

    def train(self, which: int) -> None:
        tenant = self.tenants[which]
        with self.residency.awake(tenant):
            self.check_awake(which)
            tenant.step()
            self.expected[which] = tenant.contents()

    def peek_at_weights(self, which: int) -> None:
        """The other tenant's weights beside a whole one, as in a hand-over."""
        other = 1 - which
        with self.residency.awake(self.tenants[which]), self.residency.awake(self.tenants[other], Part.WEIGHTS):
            self.check_awake(which)
            seen = {k: t for k, t in self.tenants[other].tensors.items() if k.startswith("w")}
            for key, tensor in seen.items():
                assert tensor.clone().numpy().tobytes() == self.expected[other][key], "I11 weights differ after a wake"

    def ask_for_both(self, which: int) -> None:
        with self.residency.awake(self.tenants[which]):
            with pytest.raises(ResidencyError), self.residency.awake(self.tenants[1 - which]):
                pass
            self.check_awake(which)

    def save(self, which: int) -> None:
        tenant = self.tenants[which]
        if tenant.saver.sealed_key != tenant.version:
            with self.residency.awake(tenant):
                snapshot = tenant.snapshot()
        else:
            snapshot = tenant.snapshot()
        self.held.append((which, snapshot, dict(self.expected[which])))

    def finish_save(self, number: int) -> None:
        _, snapshot, _ = self.held.pop(number % len(self.held))
        snapshot.release()
        snapshot.release()

    def load(self, number: int) -> None:
        which, snapshot, contents = self.held[number % len(self.held)]
        tenant = self.tenants[which]
        with self.residency.awake(tenant):
            tenant.version += 1
            tenant.saver.load(snapshot.tensors)
            self.expected[which] = dict(contents)
            self.check_awake(which)

    def fail(self, which: int, point: str, nth: int) -> None:
        """A transition breaks half-way, or is not reached; either way the next use works."""
        with faults.armed(f"residency.{point}.slab=raise@{nth}"):
            try:
                self.train(which)
            except ResidencyError as error:
                assert isinstance(error.__cause__, faults.FaultInjected), error

    # What must hold

    def check_awake(self, which: int) -> None:
        assert self.tenants[which].contents() == self.expected[which], "I1 the device does not hold the version trained"

    def check(self) -> None:
        assert sum(tenant.device_bytes for tenant in self.tenants) <= self.budget, "I4 the budget is exceeded"
        for which, tenant in enumerate(self.tenants):
            self.check_memory(which, tenant)
        for which, snapshot, contents in self.held:
            seen = {key: bytes(tensor.data) for key, tensor in snapshot.tensors.items()}
            assert seen == contents, f"I3 a snapshot of tenant {which} changed"

    def check_memory(self, which: int, tenant: SaverTenant) -> None:
        resident = tenant.resident()
        assert tenant.gate.allowed == Part.NONE, "a gate stands open without a lease"
        assert tenant.device_bytes == tenant.footprint(resident), "I4 the device holds what sleeps"
        live = sum(owner == which for owner, _, _ in self.held)
        assert (tenant.saver.references() > 0) == (live > 0), "I5 references do not match saves"
        assert tenant.host_bytes() <= self.state + SPARE, "I6 more pages than the state and the bound on spare ones"
        if tenant.saver.sealed_key == tenant.version:
            snapshot = tenant.saver.snapshot()
            seen = {key: bytes(tensor.data) for key, tensor in snapshot.tensors.items()}
            snapshot.release()
            assert seen == self.expected[which], "I2 the sealed pages are not one whole version"
        else:
            assert resident == Part.WEIGHTS | Part.OPTIMIZER, "I7 memory was unmapped without a seal"

    def end(self) -> None:
        while self.held:
            self.finish_save(0)
        for which in (0, 1):
            self.use(which)
        self.check()


class MemoryMachine(RuleBasedStateMachine):
    make_saver: MakeSaver = staticmethod(sound)
    which = st.integers(0, 1)
    number = st.integers(0, 7)

    def __init__(self) -> None:
        super().__init__()
        self.harness = Harness(self.make_saver)

    @rule(which=which)
    def use(self, which: int) -> None:
        self.harness.use(which)

    @rule(which=which)
    def train(self, which: int) -> None:
        self.harness.train(which)

    @rule(which=which)
    def peek(self, which: int) -> None:
        self.harness.peek_at_weights(which)

    @rule(which=which)
    def ask_for_both(self, which: int) -> None:
        self.harness.ask_for_both(which)

    @precondition(lambda self: len(self.harness.held) < 3)
    @rule(which=which)
    def save(self, which: int) -> None:
        self.harness.save(which)

    @precondition(lambda self: self.harness.held)
    @rule(number=number)
    def finish_save(self, number: int) -> None:
        self.harness.finish_save(number)

    @precondition(lambda self: self.harness.held)
    @rule(number=number)
    def load(self, number: int) -> None:
        self.harness.load(number)

    @rule(which=which, point=st.sampled_from(["capture", "restore", "release"]), nth=st.integers(1, 6))
    def fail(self, which: int, point: str, nth: int) -> None:
        self.harness.fail(which, point, nth)

    @invariant()
    def invariants(self) -> None:
        self.harness.check()

    def teardown(self) -> None:
        self.harness.end()


def walk(seed: int, make_saver: MakeSaver = sound, steps: int = 40) -> None:
    """A random walk whose weights lead to what is rare: saves that are open while their tenant trains and sleeps."""
    dice = random.Random(seed)
    harness = Harness(make_saver)
    for _ in range(steps):
        moves: list[tuple[int, Callable[[], None]]] = [
            (4, lambda: harness.train(dice.randrange(2))),
            (2, lambda: harness.use(dice.randrange(2))),
            (2, lambda: harness.peek_at_weights(dice.randrange(2))),
            (1, lambda: harness.ask_for_both(dice.randrange(2))),
            (
                1,
                lambda: harness.fail(
                    dice.randrange(2), dice.choice(["capture", "restore", "release"]), dice.randint(1, 6)
                ),
            ),
        ]
        if len(harness.held) < 3:
            moves.append((3, lambda: harness.save(dice.randrange(2))))
        if harness.held:
            moves += [(1, lambda: harness.finish_save(dice.randrange(8))), (1, lambda: harness.load(dice.randrange(8)))]
        weights, choices = zip(*moves, strict=True)
        dice.choices(choices, weights)[0]()
        harness.check()
    harness.end()
