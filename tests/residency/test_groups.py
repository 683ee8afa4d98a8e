"""Process groups over ranks (`tidemill.residency.groups`): parked and revived under live meshes and FSDP2 modules."""

import gc
import multiprocessing
import os
import signal
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from tests.residency.sharded_ranks import Job, Rank
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

from tidemill.contracts.workers import Place
from tidemill.errors import ClusterError, ResidencyError, TidemillError
from tidemill.residency.groups import ProcessGroups, open_rendezvous
from tidemill.testing.spawned import SpawnedGroup, spawned


class Impatient(Rank):
    """A rank that waits for a second only."""

    deadline = 1.0


@pytest.fixture(scope="module")
def shared() -> Iterator[dict[int, SpawnedGroup]]:
    """Patient ranks, by how many: tests that leave them alive share them."""
    made: dict[int, SpawnedGroup] = {}
    yield made
    for group in made.values():
        group.close()


@pytest.fixture
def start(shared: dict[int, SpawnedGroup]) -> Iterator[Callable[..., SpawnedGroup]]:
    own: list[SpawnedGroup] = []

    def begin(ranks: int, kind: type[Rank] = Rank) -> SpawnedGroup:
        if kind is not Rank:
            own.append(spawned("trainer", ranks, kind))
            return own[-1]
        if ranks in shared:
            try:
                shared[ranks].call("run", in_a_new_world, deadline=30)
                return shared[ranks]
            except TidemillError:
                shared[ranks].close()
        shared[ranks] = spawned("trainer", ranks, kind)
        return shared[ranks]

    yield begin
    for group in own:
        group.close()


def in_a_new_world(rank: Rank) -> None:
    rank.kept.clear()
    rank.groups.close()
    gc.unfreeze()
    assert not dist.is_initialized()
    rank.groups = ProcessGroups(place=rank.place, deadline=rank.deadline)


def park(rank: Rank) -> None:
    rank.groups.park()


def revive(rank: Rank) -> None:
    rank.groups.revive()


def fails(rank: Rank, method: str) -> tuple[str, float]:
    """The message with which a method fails, and the seconds until then."""
    began = time.monotonic()
    with pytest.raises(ResidencyError) as caught:
        getattr(rank.groups, method)()
    return str(caught.value), time.monotonic() - began


# Training


def train_and_park(rank: Rank, shape: tuple[int, ...], reshard: bool | int) -> None:
    mesh = rank.groups.mesh(shape, ("replicate", "shard")[-len(shape) :])
    twin, job = Job(rank.place.rank, mesh, reshard=reshard), Job(rank.place.rank, mesh, reshard=reshard)
    rank.groups.follow([twin.model, job.model])
    expected = [(twin.step(seed), twin.local()) for seed in range(5)]
    saver = job.saver()
    for seed, (loss, local) in enumerate(expected):
        assert job.step(seed) == loss
        assert all(torch.equal(tensor, local[name]) for name, tensor in job.local().items())
        job.reshard()
        saver.capture(seed)
        saver.release(seed)
        old = [weakref.ref(group) for group in c10d._world.pg_map]
        names = sorted(c10d._world.pg_names.values())
        rank.groups.park()
        assert rank.groups.parked
        assert [reference() for reference in old] == [None] * len(old)
        rank.groups.revive()
        assert not rank.groups.parked
        assert sorted(c10d._world.pg_names.values()) == names
        saver.restore()
    whole = [parameter.full_tensor() for parameter in job.model.parameters()]
    assert all(torch.equal(one.full_tensor(), other) for one, other in zip(twin.model.parameters(), whole, strict=True))


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
def test_an_fsdp_model_sleeps_and_parks_and_trains_as_one_that_never_did(
    start: Callable[..., SpawnedGroup], reshard: bool
) -> None:
    start(2).call("run", train_and_park, (2,), reshard, deadline=60)


@pytest.mark.parametrize(("shape", "reshard"), [((2, 2), True), ((4,), 2)], ids=["replicas", "half-gathered"])
def test_groups_of_some_ranks_come_back_under_their_names(
    start: Callable[..., SpawnedGroup], shape: tuple[int, ...], reshard: bool | int
) -> None:
    start(4).call("run", train_and_park, shape, reshard, deadline=60)


def test_the_first_collective_after_revive_may_be_one_of_some_ranks_only(start: Callable[..., SpawnedGroup]) -> None:
    ranks = start(4)
    ranks.call("run", make_halves, deadline=30)
    ranks.call("run", park, deadline=30)
    ranks.call("run", revive, deadline=30)
    first = [ranks.start(index, "run", sum_over_half) for index in (2, 3)]
    assert [answer.result(10) for answer in first] == [5.0, 5.0]
    others = [ranks.start(index, "run", sum_over_half) for index in (0, 1)]
    assert [answer.result(10) for answer in others] == [1.0, 1.0]


def make_halves(rank: Rank) -> None:
    rank.kept["mesh"] = rank.groups.mesh((2, 2), ("replicate", "shard"))
    found = [group._get_backend(torch.device("cpu")).options._timeout for group in c10d._world.pg_map]
    assert found == [timedelta(seconds=rank.deadline)] * 3


def sum_over_half(rank: Rank) -> float:
    number = torch.tensor(float(rank.place.rank))
    dist.all_reduce(number, group=rank.kept["mesh"].get_group("shard"))
    return float(number)


# What stays flat


def test_fifty_rounds_leave_groups_threads_files_and_hooks_flat(start: Callable[..., SpawnedGroup]) -> None:
    start(2).call("run", go_round, 50, deadline=120)


def go_round(rank: Rank, cycles: int) -> None:
    mesh = rank.groups.mesh((1, 2), ("replicate", "shard"))
    job = Job(rank.place.rank, mesh)
    rank.groups.follow([job.model])
    # Every library that is imported would be gone through at each collection.
    gc.freeze()
    seen = []
    for seed in range(cycles):
        rank.groups.park()
        rank.groups.revive()
        if seed % 5 == 1:
            job.step(seed)
        gc.collect()
        seen.append(
            (
                len(list(Path("/proc/self/task").iterdir())),
                len(list(Path("/proc/self/fd").iterdir())),
                len(c10d._world.pg_map),
                sys.excepthook,
            )
        )
    assert len(set(seen[2:])) == 1, seen


# Ranks that do not come


@pytest.mark.parametrize("method", ["park", "revive"])
def test_a_rank_that_does_not_come_is_named_within_the_deadline_and_may_come_later(
    start: Callable[..., SpawnedGroup], method: str
) -> None:
    ranks = start(3, Impatient)
    if method == "revive":
        ranks.call("run", park, deadline=30)
    for message, seconds in [
        answer.result(10) for answer in [ranks.start(index, "run", fails, method) for index in (0, 2)]
    ]:
        assert "rank 1 of 3 did not come within 1 s" in message
        assert seconds < 3
    ranks.call("run", {"park": park, "revive": revive}[method], deadline=30)
    ranks.call("run", {"park": revive, "revive": park}[method], deadline=30)


@pytest.mark.parametrize(("dead", "reason"), [(1, "rank 1 of 2 did not come"), (0, "process of rank 0")])
def test_a_rank_that_dies_while_parked_is_named(start: Callable[..., SpawnedGroup], dead: int, reason: str) -> None:
    ranks = start(2, Impatient)
    ranks.call("run", park, deadline=30)
    os.kill(ranks.pids[dead], signal.SIGKILL)
    time.sleep(0.2)
    message, seconds = ranks.start(1 - dead, "run", fails, "revive").result(10)
    assert reason in message
    assert seconds < 3


def test_a_rank_that_dies_in_the_middle_of_a_revival_leaves_none_waiting(start: Callable[..., SpawnedGroup]) -> None:
    ranks = start(2, Impatient)
    ranks.call("run", park, deadline=30)
    ranks.start(1, "run", die_after_meeting)
    message, seconds = ranks.start(0, "run", fails, "revive").result(20)
    assert "rank 0 of 2 failed after all had come" in message
    assert seconds < 10
    assert ranks.start(0, "run", is_parked).result(5)


def die_after_meeting(rank: Rank) -> None:
    rank.groups._make_world = rank.leave
    rank.groups.revive()


def is_parked(rank: Rank) -> bool:
    return rank.groups.parked and not dist.is_initialized()


def test_a_collective_of_some_ranks_ends_with_the_deadline_when_one_of_them_does_not_come(
    start: Callable[..., SpawnedGroup],
) -> None:
    ranks = start(2, Impatient)
    ranks.call("run", make_pair, deadline=30)
    for revived in (False, True):
        if revived:
            ranks.call("run", park, deadline=30)
            ranks.call("run", revive, deadline=30)
        message, seconds = ranks.start(0, "run", wait_for_the_other).result(20)
        assert "imed out" in message
        assert 0.5 < seconds < 5


def make_pair(rank: Rank) -> None:
    rank.kept["pair"] = dist.new_group([0, 1]).group_name
    gc.collect()


def wait_for_the_other(rank: Rank) -> tuple[str, float]:
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        dist.all_reduce(torch.ones(1), group=c10d._resolve_process_group(rank.kept["pair"]))
    return str(caught.value), time.monotonic() - began


# Use while parked, and what others do


def test_use_while_parked_raises_at_once(start: Callable[..., SpawnedGroup]) -> None:
    start(2).call("run", use_while_parked, deadline=60)


def use_while_parked(rank: Rank) -> None:
    mesh = rank.groups.mesh((1, 2), ("replicate", "shard"))
    job = Job(rank.place.rank, mesh)
    rank.groups.follow([job.model])
    loss = job.step(0)
    job.reshard()
    rank.groups.park()
    began = time.monotonic()
    with pytest.raises(ResidencyError, match="parked"):
        job.step(1)
    with pytest.raises((ValueError, RuntimeError)):
        dist.all_reduce(torch.ones(1))
    with pytest.raises((ValueError, RuntimeError)):
        next(iter(job.model.parameters())).full_tensor()
    with pytest.raises(ResidencyError, match="revive them first"):
        rank.groups.mesh((2,), ("shard",))
    assert time.monotonic() - began < 5
    rank.groups.revive()
    assert loss != 0


def test_parking_and_reviving_twice_is_once(start: Callable[..., SpawnedGroup]) -> None:
    ranks = start(2)
    for work in (revive, park, park, revive, revive, park):
        ranks.call("run", work, deadline=30)
    assert ranks.call("run", is_parked, deadline=10) == [True, True]


def test_a_group_destroyed_elsewhere_stays_so_and_the_others_keep_their_names(
    start: Callable[..., SpawnedGroup],
) -> None:
    start(2).call("run", destroy_one, deadline=60)


def destroy_one(rank: Rank) -> None:
    gone = dist.new_group([0, 1])
    kept = dist.new_group([0, 1])
    name = kept.group_name
    dist.destroy_process_group(gone)
    del gone, kept
    for _ in range(2):
        rank.groups.park()
        rank.groups.revive()
        assert sorted(c10d._world.pg_names.values()) == ["0", name]
    number = torch.ones(1)
    dist.all_reduce(number, group=c10d._resolve_process_group(name))
    assert number.item() == 2


def test_a_world_destroyed_elsewhere_comes_back_with_the_next_revival(start: Callable[..., SpawnedGroup]) -> None:
    start(2).call("run", destroy_all, deadline=60)


def destroy_all(rank: Rank) -> None:
    job = Job(rank.place.rank, rank.groups.mesh((1, 2), ("replicate", "shard")))
    rank.groups.follow([job.model])
    job.step(0)
    dist.destroy_process_group()
    rank.groups.park()
    rank.groups.revive()
    job.step(1)


def test_a_group_that_somebody_holds_is_named_for_its_memory_is_not_free(start: Callable[..., SpawnedGroup]) -> None:
    start(2).call("run", hold_one, deadline=60)


def hold_one(rank: Rank) -> None:
    held = [dist.new_group([0, 1])]
    name = held[0].group_name
    message, _ = fails(rank, "park")
    assert f"somebody still holds {{'{name}': ['list']}}" in message
    assert rank.groups.parked
    held.clear()
    rank.groups.revive()
    rank.groups.park()


def test_groups_that_could_not_be_made_again_are_refused_before_anything_is_destroyed(
    start: Callable[..., SpawnedGroup],
) -> None:
    start(2).call("run", make_strange_one, deadline=60)


def make_strange_one(rank: Rank) -> None:
    c10d._new_group_with_tag([0, 1], pg_tag="mine")
    message, _ = fails(rank, "park")
    assert "not made by `new_group`" in message
    assert not rank.groups.parked
    dist.all_reduce(torch.ones(1))


# Beginning and end


def alone() -> ProcessGroups:
    return ProcessGroups(place=Place(), deadline=5)


def test_a_rank_alone_needs_no_rendezvous() -> None:
    groups = alone()
    try:
        mesh = groups.mesh((1,), ("shard",))
        groups.park()
        groups.revive()
        assert mesh.get_group().size() == 1
    finally:
        groups.close()


def test_closing_ends_the_world_and_the_recording_from_any_state() -> None:
    plain = dist.new_group
    for parked in (False, True):
        groups = alone()
        assert dist.new_group is not plain
        if parked:
            groups.park()
        for _ in range(2):
            groups.close()
        assert not dist.is_initialized()
        assert {dist.new_group, c10d.new_group, device_mesh.new_group} == {plain}


def test_a_process_that_has_a_world_cannot_join_another() -> None:
    groups = alone()
    try:
        with pytest.raises(ResidencyError, match="another world of 1 ranks"):
            alone()
    finally:
        groups.close()
    assert not dist.is_initialized()


def test_a_world_that_others_made_meanwhile_is_left_alone() -> None:
    groups = alone()
    groups.park()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ResidencyError, match="somebody else made a world"):
            groups.revive()
        groups.close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("rendezvous", "reason"),
    [("", "must be `host:port`"), ("here", "must be `host:port`"), ("127.0.0.1:1", "no store answers at 127.0.0.1:1")],
    ids=["none", "no-port", "nobody"],
)
def test_a_rendezvous_that_cannot_be_reached_is_named(rendezvous: str, reason: str) -> None:
    plain = dist.new_group
    with pytest.raises(ClusterError, match=reason):
        ProcessGroups(place=Place(rank=1, ranks=2, rendezvous=rendezvous), deadline=0.5)
    assert dist.new_group is plain
    assert not dist.is_initialized()


def test_ranks_that_never_join_are_named() -> None:
    plain = dist.new_group
    with pytest.raises(ResidencyError, match="ranks 0, 2 of 3 did not come"):
        ProcessGroups(place=Place(rank=1, ranks=3, rendezvous=open_rendezvous("127.0.0.1")), deadline=0.3)
    assert dist.new_group is plain


def test_a_rendezvous_is_reached_at_its_own_address_and_at_no_other_of_this_machine() -> None:
    port = int(open_rendezvous("127.0.0.1").rpartition(":")[2])
    socket.create_connection(("127.0.0.1", port), 5).close()
    families = (socket.AF_INET, socket.AF_INET6)
    there = {str(one.address) for each in psutil.net_if_addrs().values() for one in each if one.family in families}
    for address in (there | {"127.0.0.2", "::1"}) - {"127.0.0.1"}:
        with pytest.raises(OSError):
            socket.create_connection((address, port), 5)


def test_a_rendezvous_at_an_address_that_is_not_of_this_machine_is_refused() -> None:
    for host in ("192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(ClusterError, match=f"meeting point for ranks at {host}: .*--node-ip-address"):
            open_rendezvous(host)


def test_one_rendezvous_serves_one_world_after_the_other(start: Callable[..., SpawnedGroup]) -> None:
    ranks = start(2)
    for _ in range(2):
        ranks.call("run", begin_again, deadline=30)


def begin_again(rank: Rank) -> None:
    rank.groups.park()
    rank.groups.close()
    rank.groups = ProcessGroups(place=rank.place, deadline=5)
    number = torch.ones(1)
    dist.all_reduce(number)
    assert number.item() == 2


def live(place: Place, closing: bool) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    groups = ProcessGroups(place=place, deadline=20)
    groups.park()
    groups.revive()
    if closing:
        groups.close()


@pytest.mark.parametrize("closing", [True, False], ids=["closed", "just-left"])
def test_processes_end_cleanly(closing: bool) -> None:
    context = multiprocessing.get_context("forkserver")
    address = open_rendezvous("127.0.0.1")
    made = [
        context.Process(target=live, args=(Place(rank=rank, ranks=2, rendezvous=address), closing), daemon=True)
        for rank in range(2)
    ]
    for process in made:
        process.start()
    for process in made:
        process.join(30)
    assert [process.exitcode for process in made] == [0, 0]
