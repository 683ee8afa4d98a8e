"""Sharded parameters in the saver (`tidemill.residency.sharded`, `tidemill.compat.fsdp_internals`)."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.residency.sharded_ranks import Job, Rank
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

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
    slabs = {slab.memory.flat.untyped_storage().data_ptr() for slab in saver._crossing.slabs}
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


# Pieces


def pieces(rank: Rank, shape: tuple[int, ...]) -> tuple[dict[str, TensorBytes], dict[str, bytes]]:
    job = Job(rank.place.rank, mesh_of(rank, shape))
    job.step(0)
    job.reshard()
    saver = job.saver()
    saver.capture(0)
    snapshot = saver.snapshot()
    tensors = dict(snapshot.tensors)
    whole = {name: parameter.full_tensor() for name, parameter in job.model.named_parameters()}
    return tensors, {f"model/{name}": bytes(tensor.detach().numpy().tobytes()) for name, tensor in whole.items()}


@pytest.mark.parametrize(("size", "shape"), [(2, (2,)), (4, (4,)), (4, (2, 2))], ids=str)
def test_the_pieces_of_a_snapshot_together_are_the_whole_tensors(
    ranks: Callable[[int], SpawnedGroup], size: int, shape: tuple[int, ...]
) -> None:
    answers = ranks(size).call("run", pieces, shape, deadline=60)
    held = [tensors for tensors, _ in answers][: shape[-1]]
    for name, whole in answers[0][1].items():
        specs = [tensors[name].spec for tensors in held]
        assert {spec.whole for spec in specs} == {specs[0].whole}
        rows = [spec.offset[0] for spec in specs]
        assert rows == sorted(rows)
        assert all(spec.offset[0] + spec.shape[0] <= spec.whole[0] for spec in specs)
        assert b"".join(bytes(tensors[name].data) for tensors in held) == whole
        assert tensors_of_moments(held, name) == [specs, specs]


def tensors_of_moments(held: list[dict[str, TensorBytes]], name: str) -> list[Any]:
    names = [name.replace("model", key) for key in ("exp_avg", "exp_avg_sq")]
    return [[tensors[name].spec for tensors in held] for name in names]


def load_and_go_on(rank: Rank) -> None:
    mesh = mesh_of(rank, (4,))
    job, other = Job(rank.place.rank, mesh), Job(rank.place.rank, mesh)
    saver, into = job.saver(), other.saver()
    job.step(0)
    saver.capture(0)
    for seed in range(3):
        other.step(seed + 50)
    other.reshard()
    into.load(saver.snapshot().tensors)
    # The count of steps is the trainer's own.
    for one, two in zip(job.optimizer.state.values(), other.optimizer.state.values(), strict=True):
        two["step"].copy_(one["step"])
    for seed in range(1, 4):
        assert job.step(seed) == other.step(seed)
    assert equal(job.local(), other.local())


def test_a_rank_loads_its_own_pieces_and_trains_on_with_them(ranks: Callable[[int], SpawnedGroup]) -> None:
    ranks(4).call("run", load_and_go_on, deadline=60)


# Refusals, and memory that was exchanged


def refuse(rank: Rank) -> None:
    job = Job(rank.place.rank, mesh_of(rank, (2,)))
    weight = job.model.embed.weight
    saver = HostArenaSaver(device="cpu", pin=False)
    with pytest.raises(ResidencyError, match="nobody said where this DTensor's memory lies"):
        saver.add("w", weight, Part.WEIGHTS)
    job.model.unshard()
    with pytest.raises(ResidencyError, match="gathered now"):
        saver.follow(job.model)
    job.reshard()
    saver.follow(job.model)
    with pytest.raises(ResidencyError, match="nobody said"):
        saver.add("copy", weight.detach(), Part.WEIGHTS)
    saver.add("w", weight, Part.WEIGHTS)
    saver.add("tied", weight, Part.WEIGHTS)
    with pytest.raises(ResidencyError, match="registered as weights"):
        saver.add("moment", weight, Part.OPTIMIZER)


def test_a_dtensor_whose_memory_is_unknown_is_refused(ranks: Callable[[int], SpawnedGroup]) -> None:
    ranks(2).call("run", refuse, deadline=30)


@pytest.mark.parametrize(
    ("whole", "offset"), [((4, 3), None), ((4, 3), (3, 0)), ((4,), (0,)), ((4, 3), (-1, 0)), (None, (0, 0))], ids=str
)
def test_a_piece_that_does_not_lie_in_its_whole_is_refused(whole: Any, offset: Any) -> None:
    saver = HostArenaSaver(device="cpu", pin=False)
    with pytest.raises(ResidencyError, match="does not lie at"):
        saver.add("w", torch.zeros(2, 3), Part.WEIGHTS, whole=whole, offset=offset)


def exchange_memory(rank: Rank) -> None:
    mesh = mesh_of(rank, (2,))
    twin, job = Job(rank.place.rank, mesh), Job(rank.place.rank, mesh)
    for parameter in job.model.parameters():
        # As loaders do: the local tensor becomes another one, which FSDP2 does not know of yet.
        parameter._local_tensor = parameter._local_tensor.clone()
    saver = job.saver()
    check_places(job, saver)
    for seed in range(3):
        assert twin.step(seed) == job.step(seed)
        job.reshard()
        saver.capture(seed)
        saver.release(seed)
        saver.restore()
    assert equal(twin.local(), job.local())


def test_memory_that_was_exchanged_before_the_first_pass_is_found(ranks: Callable[[int], SpawnedGroup]) -> None:
    ranks(2).call("run", exchange_memory, deadline=30)


def from_meta(rank: Rank) -> None:
    with torch.device("meta"):
        job = Job(rank.place.rank, mesh_of(rank, (4,)), optimize=False)
    job.model.to_empty(device="cpu")
    twin = Job(rank.place.rank, mesh_of(rank, (4,)))
    with torch.no_grad():
        for mine, theirs in zip(job.model.parameters(), twin.model.parameters(), strict=True):
            mine._local_tensor.copy_(theirs._local_tensor)
    saver = HostArenaSaver(device="cpu", page_bytes=1024, pin=False)
    saver.follow(job.model)
    for name, parameter in job.model.named_parameters():
        saver.add(name, parameter, Part.WEIGHTS)
    saver.freeze()
    check_places(job, saver)
    saver.capture(0)
    saver.release(0)
    saver.restore()
    ids = torch.arange(33)[None]
    assert torch.equal(job.model(ids), twin.model(ids))


def test_a_model_that_was_made_without_memory_first_is_kept_right(ranks: Callable[[int], SpawnedGroup]) -> None:
    ranks(4).call("run", from_meta, deadline=30)


def boxes(rank: Rank) -> None:
    flat, grid = mesh_of(rank, (4,)), mesh_of(rank, (2, 2))
    for mesh, placements in [(flat, [Shard(0)]), (grid, [Replicate(), Shard(0)]), (grid, [Replicate(), Replicate()])]:
        for shape in [(33, 10), (3, 2), (1,), (8, 4, 2)]:
            whole = torch.arange(torch.Size(shape).numel()).view(shape)
            piece = distribute_tensor(whole, mesh, placements)
            found, offset = box_of(piece)
            local = piece.to_local()
            assert found == shape
            assert torch.equal(whole[offset[0] : offset[0] + local.size(0)], local)
    with pytest.raises(ResidencyError, match="only splitting along the first dimension"):
        box_of(distribute_tensor(torch.zeros(8, 8), flat, [Shard(1)]))
    with pytest.raises(ResidencyError, match="over one dimension of the mesh"):
        box_of(distribute_tensor(torch.zeros(8, 8), grid, [Shard(0), Shard(0)]))


def test_a_box_is_where_a_rank_s_rows_lie_in_the_whole(ranks: Callable[[int], SpawnedGroup]) -> None:
    ranks(4).call("run", boxes, deadline=30)
