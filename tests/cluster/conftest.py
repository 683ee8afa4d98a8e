"""Trainers whose ranks are forked processes."""

import functools
import random
from collections.abc import Iterator

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
    """Makes trainers of `size` ranks, each in processes of its own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.events: list[Event] = []
        self.groups: list[SpawnedGroup] = []

    def __call__(
        self, build: BuildTrainer = build_fake_rank, *, faults: str = "", deadlines: Deadlines = DEADLINES
    ) -> TrainerProxy:
        group = SpawnedGroup("trainer", self.size, fault_text=faults, emit=self.events.append)
        self.groups.append(group)
        group.build(functools.partial(TrainerService, functools.partial(seeded, build)), meet=self.size > 1)
        return TrainerProxy(group, deadlines=deadlines)

    def end(self) -> None:
        for group in self.groups:
            group.close()


@pytest.fixture
def two_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.end()


@pytest.fixture
def three_ranks() -> Iterator[Ranks]:
    ranks = Ranks(3)
    yield ranks
    ranks.end()


@pytest.fixture
def one_rank() -> Iterator[Ranks]:
    ranks = Ranks(1)
    yield ranks
    ranks.end()
