"""Trainers whose ranks are forked processes, which are used again from test to test where that is possible."""

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tidemill.cluster.tenant_proxy import Deadlines
from tidemill.cluster.trainer_proxy import TrainerProxy
from tidemill.cluster.trainer_service import TrainerService
from tidemill.contracts.events import Emit, Event
from tidemill.contracts.trainer import RankTrainer
from tidemill.contracts.workers import BuildTrainer, Place
from tidemill.testing.fakes.rank_trainer import build_fake_rank
from tidemill.testing.spawned import SpawnedGroup

DEADLINES = Deadlines(work=60.0, transition=30.0, control=20.0)


def seeded(build: BuildTrainer, place: Place, emit: Emit) -> RankTrainer:
    """As a run does: every process of it begins with the run's seed."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return build(place, emit)


class Ranks:
    """Makes trainers of `size` ranks, each in processes of its own, and ends those with the test."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.events: list[Event] = []
        self.groups: list[SpawnedGroup] = []
        self.unused: list[SpawnedGroup] = []

    def __call__(
        self, build: BuildTrainer = build_fake_rank, *, faults: str = "", deadlines: Deadlines = DEADLINES
    ) -> TrainerProxy:
        group = self.unused.pop() if self.unused and not faults else self._start(faults)
        self.groups.append(group)
        group.build(functools.partial(TrainerService, functools.partial(seeded, build)), meet=self.size > 1)
        return TrainerProxy(group, deadlines=deadlines, emit=self.events.append)

    def _start(self, faults: str) -> SpawnedGroup:
        return SpawnedGroup("trainer", self.size, fault_text=faults, emit=self.events.append)

    def reuse(self) -> None:
        """Keep the processes that still answer for the next test: their services are replaced."""
        for group in self.groups:
            try:
                group.call("changes", deadline=5.0)
                self.unused.append(group)
            except Exception:
                group.close()
        self.groups.clear()
        self.events.clear()

    def end(self) -> None:
        for group in self.groups + self.unused:
            group.close()


MakeRanks = Callable[..., TrainerProxy]


@pytest.fixture
def two_ranks() -> Iterator[Ranks]:
    """Two fresh processes a trainer."""
    ranks = Ranks(2)
    yield ranks
    ranks.end()


@pytest.fixture(scope="module")
def kept_ranks() -> Iterator[Callable[[int], Any]]:
    """By number of ranks: makers whose processes outlive a test. Ask `reuse` at a test's end."""
    made: dict[int, Ranks] = {}
    yield lambda size: made.setdefault(size, Ranks(size))
    for ranks in made.values():
        ranks.end()
