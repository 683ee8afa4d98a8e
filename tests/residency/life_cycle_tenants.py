"""Tenants reduced to their memory: ranks with a real saver each, and tensors that follow from the version alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tidemill.checkpoint.shard import LocalShard
from tidemill.contracts.checkpoint import Saved, Snapshot
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Moved
from tidemill.residency.gate import TenantGate
from tidemill.residency.savers.host_arena import HostArenaSaver
from tidemill.trainers.fsdp.pieces import boxes

__all__ = ["PAGE", "Contents", "RankedTenant", "Version", "as_bytes", "contents_of", "make_saver"]

PAGE = 512
ROWS = 60
NAMES = ("w0", "w1", "w2", "m0", "m1")
Contents = dict[str, bytes]


@dataclass(frozen=True, order=True)
class Version:
    """Which contents: the attempt that trained them, and the step. No two have an element in common."""

    attempt: int
    step: int


def contents_of(rank: int, version: Version) -> dict[str, torch.Tensor]:
    """A rank's rows of every tensor."""
    start = version.attempt * 1e5 + version.step * 1e3 + rank * 100
    return {name: torch.full((ROWS,), start + number) for number, name in enumerate(NAMES)}


def make_saver(spare_bytes: int | None = None) -> HostArenaSaver:
    """On the CPU, with pages so small that a slab has several, and hardly any patience with readers."""
    return HostArenaSaver(
        device="cpu",
        page_bytes=PAGE,
        pin=False,
        spare_bytes=spare_bytes,
        deadline=0.02,
        free_host_bytes=lambda: 1 << 30,
    )


def as_bytes(tensors: dict[str, torch.Tensor]) -> Contents:
    return {name: tensor.clone().numpy().tobytes() for name, tensor in tensors.items()}


class RankedTenant:
    """A trainer of some ranks in one process: a Tenant, and a Stateful. Asleep from the start."""

    def __init__(self, name: str, make: Callable[[], HostArenaSaver], *, ranks: int, attempt: int = 0) -> None:
        self.name = name
        self.gate = TenantGate(name)
        self.version = Version(attempt, 0)
        self.savers = [make() for _ in range(ranks)]
        self.tensors = [contents_of(rank, self.version) for rank in range(ranks)]
        self.written_last_first = False
        self.silent: set[int] = set()
        for rank, saver in enumerate(self.savers):
            for key, tensor in self.tensors[rank].items():
                part = Part.WEIGHTS if key.startswith("w") else Part.OPTIMIZER
                saver.add(key, tensor, part, whole=(ranks * ROWS,), offset=(rank * ROWS,))
            saver.freeze()
        self.sleep()

    # A tenant

    def resident(self) -> Part:
        found = Part.WEIGHTS | Part.OPTIMIZER
        for saver in self.savers:
            found &= saver.resident_part()
        return found

    def footprint(self, part: Part) -> int:
        return sum(saver.device_bytes(part) for saver in self.savers)

    def host_bytes(self) -> int:
        return sum(saver.host_bytes() for saver in self.savers)

    def wake_up(self, part: Part) -> Moved:
        return Moved(copied=sum(saver.restore(part) for saver in self.savers))

    def sleep(self) -> Moved:
        copied = [saver.capture(self.version) for saver in self.savers]
        for saver in self.savers:
            saver.release(self.version)
        return Moved(copied=sum(one.copied for one in copied), waited=max(one.waited for one in copied))

    # A part of a checkpoint

    def snapshot(self) -> Snapshot:
        if any(saver.sealed_key != self.version for saver in self.savers):
            self.gate.check(Part.ALL, "snapshot")
            for saver in self.savers:
                saver.capture(self.version)
        self.held = [saver.snapshot() for saver in self.savers]
        there = [one for rank, one in enumerate(self.held) if rank not in self.silent]
        shards = [LocalShard(one.tensors, one.written) for one in there]
        extra = {"ranks": len(self.savers), "version": [self.version.attempt, self.version.step]}
        return Snapshot(
            shards=shards[::-1] if self.written_last_first else shards,
            extra=extra,
            release=partial(_release, self.held),
        )

    def load(self, saved: Saved) -> None:
        self.gate.check(Part.ALL, "load")
        for saver in self.savers:
            saver.load(boxes(saver.ledger, saved.tensors))
        self.version = Version(*saved.extra["version"])

    # A trainer

    def step(self, attempt: int) -> None:
        self.gate.check(Part.ALL, "step")
        self.version = Version(attempt, self.version.step + 1)
        for rank, tensors in enumerate(self.tensors):
            for name, now in contents_of(rank, self.version).items():
                tensors[name].copy_(now)

    # What is looked at

    def contents(self) -> list[Contents]:
        return [as_bytes(tensors) for tensors in self.tensors]

    def expected(self) -> list[Contents]:
        return [as_bytes(contents_of(rank, self.version)) for rank in range(len(self.savers))]

    def device_bytes(self) -> int:
        """What is really allocated, whatever the tenant says: of what is in a ledger, and of what is in none."""
        storages = {
            storage.data_ptr(): storage.nbytes()
            for tensors in self.tensors
            for tensor in tensors.values()
            if (storage := tensor.untyped_storage()).nbytes()
        }
        return sum(storages.values())

    def references(self) -> int:
        return sum(saver.references() for saver in self.savers)

    def sealed(self) -> bool:
        return all(saver.sealed_key == self.version for saver in self.savers)


def _release(held: Sequence[Snapshot]) -> None:
    for snapshot in held:
        snapshot.release()
