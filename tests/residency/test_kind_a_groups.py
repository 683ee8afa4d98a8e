"""Faults of kind A that are of process groups: A03, A05 and A06, with ranks of the real trainer in processes."""

import gc
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from tests.residency.kind_a_ranks import state_of, train, trainer_of_ranks
from tests.residency.sharded_ranks import Job, Rank
from torch.distributed import distributed_c10d as c10d

from tidemill.cluster.trainer_proxy import TrainerProxy
from tidemill.compat import recorded_groups
from tidemill.contracts.footprint import Part
from tidemill.testing.spawned import SpawnedGroup, spawned
from tidemill.testing.suites.trainer import same
from tidemill.testing.tiny import make_tiny_model

Make = Callable[..., TrainerProxy]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=16, heads=2, kv_heads=1)


@pytest.fixture
def make(model: Path) -> Iterator[Make]:
    made: list[SpawnedGroup] = []
    yield lambda ranks, **words: trainer_of_ranks(model, ranks, made=made, **words)
    for group in made:
        group.close()


@pytest.fixture
def pair() -> Iterator[SpawnedGroup]:
    group = spawned("trainer", 2, Rank)
    yield group
    group.close()


# A03: a group is gone already


@pytest.mark.parametrize("world", [False, True], ids=["groups-of-some", "world"])
def test_a03_ranks_whose_groups_somebody_destroyed_sleep_and_wake_and_all_that_are_used_come_back(
    make: Make, world: bool
) -> None:
    """A03: what the model's mesh needs is made anew, and the trained bits are those of ranks that nobody harmed."""
    harmed, steady = make(4, replicas=2), make(4, replicas=2)
    for trainer in (harmed, steady):
        train(trainer, [0])
    before = harmed.each("group_names", [()] * 4)
    assert [len(names) for names in before] == [3] * 4
    harmed.each("destroy_groups", [(world,)] * 4)
    harmed.sleep()
    harmed.wake_up(Part.ALL)
    assert harmed.each("group_names", [()] * 4) == before
    assert harmed.each("total_of", [(float(rank),) for rank in range(4)]) == [6.0] * 4
    for trainer in (harmed, steady):
        train(trainer, [1, 2])
    assert same(state_of(harmed), state_of(steady))


# A05: a rank that is late


def late_rounds(rank: Rank, delays: list[tuple[int, float]]) -> list[float]:
    """Seconds of each revival, after which the groups are used at once; in each round one rank is late."""
    pair = dist.new_group([0, 1]).group_name
    gc.collect()
    seconds = []
    for late, delay in delays:
        rank.groups.park()
        if late == rank.place.rank:
            time.sleep(delay)
        began = time.monotonic()
        rank.groups.revive()
        seconds.append(time.monotonic() - began)
        for name in (str(c10d._get_default_group().group_name), pair):
            assert total(rank, name) == 3.0
    return seconds


def total(rank: Rank, name: str) -> float:
    value = torch.tensor(float(rank.place.rank + 1))
    dist.all_reduce(value, group=c10d._resolve_process_group(name))
    return value.item()


def test_a05_wake_returns_when_all_ranks_are_ready_whoever_is_late_and_groups_may_be_used_at_once(
    pair: SpawnedGroup,
) -> None:
    """A05: 20 rounds, in one of them a rank two seconds late."""
    delays = [(turn % 2, 2.0 if turn == 7 else 0.05) for turn in range(20)]
    seconds = pair.call("run", late_rounds, delays, deadline=60)
    for turn, (late, delay) in enumerate(delays):
        assert seconds[1 - late][turn] > 0.9 * delay, "the rank that was in time did not wait"


def test_a05_a_trainer_whose_rank_wakes_late_steps_at_once_with_the_right_bits(make: Make) -> None:
    """A05 with the real trainer: the driver's wake waits for the late rank."""
    late, steady = make(2, faults="trainer-1/groups.begin=delay:2@2"), make(2)
    for trainer in (late, steady):
        train(trainer, [0])
        trainer.sleep()
    began = time.monotonic()
    late.wake_up(Part.ALL)
    assert time.monotonic() - began > 1.9
    for trainer in (late, steady):
        train(trainer, [1])
    assert same(state_of(late), state_of(steady))


# A06: growth with every round


def rounds_with_a_second_hook(rank: Rank, cycles: int) -> None:
    """The module that records groups is loaded once more, and its hook laid around ours, twice."""
    spec = importlib.util.spec_from_file_location("another_copy", recorded_groups.__file__)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    sys.modules["another_copy"] = copy
    spec.loader.exec_module(copy)
    second = copy.RecordedGroups(timeout=rank.groups._timeout)
    second.install()
    second.install()
    job = Job(rank.place.rank, rank.groups.mesh((1, 2), ("replicate", "shard")))
    rank.groups.follow([job.model])
    saver = job.saver()
    gc.freeze()
    process, seen, resident = psutil.Process(), [], []
    for turn in range(cycles):
        job.step(turn)
        job.reshard()
        saver.capture(turn)
        saver.release(turn)
        rank.groups.park()
        rank.groups.revive()
        saver.restore()
        gc.collect()
        calls = len(rank.groups._calls._calls), len(second._calls)
        seen.append((len(c10d._world.pg_map), process.num_threads(), process.num_fds(), saver.host_bytes(), *calls))
        resident.append(process.memory_info().rss)
    assert len(set(seen[2:])) == 1, seen
    assert max(resident[10:]) - resident[9] < 4 << 20, resident
    second.remove()


def test_a06_fifty_sleeps_under_a_hook_laid_twice_by_two_copies_of_its_module_leave_all_counts_flat(
    pair: SpawnedGroup,
) -> None:
    """A06: groups, threads, files, host pages, recorded calls and resident bytes."""
    pair.call("run", rounds_with_a_second_hook, 50, deadline=120)
