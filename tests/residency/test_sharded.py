"""Sharded parameters in the saver (`tidemill.residency.sharded`, `tidemill.compat.fsdp_internals`)."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.residency.sharded_ranks import Job, Rank
from tidemill.compat.fsdp_internals import parameters_of
from tidemill.contracts.checkpoint import TensorBytes
from tidemill.contracts.footprint import Part
from tidemill.errors import ResidencyError
from tidemill.residency.savers.host_arena import HostArenaSaver
from tidemill.residency.sharded import box_of
from tidemill.testing.spawned import SpawnedGroup, spawned

STEPS = 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], SpawnedGroup]]:
    groups: dict[int, SpawnedGroup] = {}

    def get(size: int) -> SpawnedGroup:
        if size not in groups:
            groups[size] = spawned("trainer", size, Rank)
        return groups[size]

    yield get
    for group in groups.values():
        group.close()


def mesh_of(rank: Rank, shape: tuple[int, ...]) -> Any:
    return rank.groups.mesh(shape, ("replicate", "shard")[-len(shape) :])


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def memory(job: Job) -> list[torch.Tensor]:
    found = []
    for known in parameters_of(job.model):
        found += [known._sharded_param_data, known.sharded_param._local_tensor]
    return found


def train_beside_a_twin(rank: Rank, shape: tuple[int, ...], settings: dict[str, Any], warm: bool) -> None:
    mesh = mesh_of(rank, shape)
    twin, job = Job(rank.place.rank, mesh, **settings), Job(rank.place.rank, mesh, **settings)
    if warm:
        # FSDP2 settles its memory in the first forward pass: the saver must be right before it and after it.
        assert twin.step(99) == job.step(99)
        job.reshard()
    objects = [id(tensor) for tensor in memory(job)]
    saver = job.saver()
    assert equal(twin.local(), job.local())
    for seed in range(STEPS):
        assert twin.step(seed) == job.step(seed)
        assert equal(twin.local(), job.local())
        job.reshard()
        saver.capture(seed)
        saver.release(seed)
        assert [tensor.untyped_storage().nbytes() for tensor in memory(job)] == [0] * len(objects)
        saver.restore()
        assert equal(twin.local(), job.local())
    assert [id(tensor) for tensor in memory(job)] == objects
    check_places(job, saver)


def check_places(job: Job, saver: HostArenaSaver) -> None:
    """Buffer and view lie at one address of a slab; a view without elements still lies in its buffer's storage."""
    slabs = {slab.memory.untyped_storage().data_ptr() for slab in saver._slabs}
    for known in parameters_of(job.model):
        buffer, local = known._sharded_param_data, known.sharded_param._local_tensor
        assert buffer.untyped_storage().data_ptr() in slabs
        assert local.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        assert local.storage_offset() == buffer.storage_offset() or local.numel() == 0
        assert known._module_info.module._parameters[known._module_info.param_name] is known.sharded_param


@pytest.mark.parametrize("warm", [False, True], ids=["before", "after-a-pass"])
@pytest.mark.parametrize(
    "settings", [{}, {"half": True}, {"reshard": False}, {"half": True, "reshard": False}], ids=str
)
def test_two_ranks_train_through_sleeps_as_an_untouched_twin(
    ranks: Callable[[int], SpawnedGroup], settings: dict[str, Any], warm: bool
) -> None:
    ranks(2).call("run", train_beside_a_twin, (2,), settings, warm, deadline=60)


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=str)
def test_ranks_with_empty_shards_and_replicas_train_through_sleeps_as_an_untouched_twin(
    ranks: Callable[[int], SpawnedGroup], shape: tuple[int, ...]
) -> None:
    ranks(4).call("run", train_beside_a_twin, shape, {}, False, deadline=60)
