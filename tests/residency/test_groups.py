"""Process groups over ranks (`tidemill.residency.groups`): parked and revived under live meshes and FSDP2 modules."""

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp import fully_shard

from tidemill.contracts.events import Emit
from tidemill.contracts.workers import Place
from tidemill.errors import ResidencyError
from tidemill.residency.groups import ProcessGroups
from tidemill.testing.spawned import SpawnedGroup, spawned


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(33, 10)
        self.layers = nn.ModuleList([nn.Linear(10, 10) for _ in range(2)])
        self.head = nn.Linear(10, 33, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)


class Rank:
    """One rank as a trainer would be: groups, a sharded model, an optimizer."""

    def __init__(self, place: Place, emit: Emit, deadline: float = 20.0) -> None:
        self.place = place
        self.groups = ProcessGroups(place=place, deadline=deadline)

    def shard(self, shape: tuple[int, ...], names: tuple[str, ...], reshard: bool | int = True) -> None:
        torch.manual_seed(0)
        self.mesh = self.groups.mesh(shape, names)
        self.model = Net()
        for layer in self.model.layers:
            fully_shard(layer, mesh=self.mesh, reshard_after_forward=reshard)
        fully_shard(self.model, mesh=self.mesh, reshard_after_forward=reshard)
        self.groups.follow([self.model])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def step(self, seed: int) -> float:
        ids = torch.randint(0, 33, (4, 6), generator=torch.Generator().manual_seed(100 * seed + self.place.rank))
        loss = nn.functional.cross_entropy(self.model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())

    def train(self, *, cycles: int, parking: bool) -> tuple[list[float], bytes]:
        losses = []
        for seed in range(cycles + 1):
            losses.append(self.step(seed))
            if parking and seed < cycles:
                self.park_and_revive()
        local = [parameter.to_local().detach().numpy().tobytes() for parameter in self.model.parameters()]
        return losses, b"".join(local)

    def park_and_revive(self) -> None:
        old = [weakref.ref(group) for group in c10d._world.pg_map]
        names = sorted(c10d._world.pg_names.values())
        self.groups.park()
        assert self.groups.parked
        assert not c10d._world.pg_map
        gc.collect()
        assert [reference() for reference in old] == [None] * len(old)
        self.groups.revive()
        assert sorted(c10d._world.pg_names.values()) == names

    def park(self) -> None:
        self.groups.park()

    def revive(self) -> None:
        self.groups.revive()

    def close(self) -> None:
        self.groups.close()

    def timed(self, method: str) -> tuple[str, float]:
        began = time.monotonic()
        with pytest.raises(ResidencyError) as caught:
            getattr(self.groups, method)()
        return str(caught.value), time.monotonic() - began

    def kept(self) -> tuple[int, int, int]:
        gc.collect()
        return (
            threading.active_count() + _system_threads(),
            len(list(Path("/proc/self/fd").iterdir())),
            len(c10d._world.pg_map),
        )

    def run(self, work: Callable[["Rank"], Any]) -> Any:
        return work(self)


class Impatient(Rank):
    """With a short deadline."""

    def __init__(self, place: Place, emit: Emit) -> None:
        super().__init__(place, emit, deadline=1.0)


def _system_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.fixture
def start() -> Iterator[Callable[..., SpawnedGroup]]:
    made: list[SpawnedGroup] = []

    def begin(ranks: int, kind: type[Rank] = Rank) -> SpawnedGroup:
        made.append(spawned("trainer", ranks, kind))
        return made[-1]

    yield begin
    for group in made:
        group.close()


def twin(start: Callable[..., SpawnedGroup], ranks: int, *arguments: Any, cycles: int = 3) -> None:
    results = []
    for parking in (False, True):
        group = start(ranks)
        group.call("shard", *arguments, deadline=60)
        results.append(group.call("run", _Train(cycles, parking), deadline=60))
        group.close()
    assert results[0] == results[1]


class _Train:
    def __init__(self, cycles: int, parking: bool) -> None:
        self.cycles, self.parking = cycles, parking

    def __call__(self, rank: Rank) -> Any:
        return rank.train(cycles=self.cycles, parking=self.parking)


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
def test_an_fsdp_model_trains_bit_equal_through_parking(start: Callable[..., SpawnedGroup], reshard: bool) -> None:
    twin(start, 2, (2,), ("shard",), reshard)


def test_a_two_by_two_mesh_trains_bit_equal_through_parking(start: Callable[..., SpawnedGroup]) -> None:
    twin(start, 4, (2, 2), ("replicate", "shard"))
