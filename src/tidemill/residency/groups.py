"""Process groups of one rank: made, parked while the rank sleeps, and revived.

Communicators hold 0.5 to 10 GB a rank. Parking destroys them all; reviving makes the world again, in a part of the
store of its own, repeats every `new_group` call in the old order, so that names are the old ones, and puts the new
groups where FSDP2 and device meshes held the old ones. DTensors and meshes go by name and notice nothing.

Not covered, and refused: groups made by `split_group` (bind no `device_id`), and a world that others made.
"""

import contextlib
import gc
import socket
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tidemill import faults
from tidemill.compat.fsdp_internals import owners_of_groups
from tidemill.compat.recorded_groups import RecordedGroups
from tidemill.contracts.workers import Place
from tidemill.errors import ClusterError, ResidencyError
from tidemill.residency.meeting import MeetingPoint
from tidemill.residency.references import References
from tidemill.residency.residue import GROUPS, residue_of

__all__ = ["ProcessGroups", "open_rendezvous"]

_servers: dict[str, TCPStore] = {}
# Worlds that this process was part of, by rendezvous: each has keys of its own in the store.
_joined: Counter[str] = Counter()
# One library for each device. No device is bound: torch would then split communicators, which is not recorded.
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def open_rendezvous(host: str) -> str:
    """Start the store at which ranks meet, in this process, on any free port; `host:port`. It ends with the process.

    It answers at that address only, not at others of this machine: it asks nobody who they are. Raises ClusterError.
    """
    try:
        # Left to bind by itself, the store listens on all interfaces.
        listener = socket.create_server((host, 0), family=_family(host))
    except OSError as error:
        raise ClusterError(
            f"cannot open a meeting point for ranks at {host}: {error}; it must be an address of this machine: start "
            "Ray here with `--node-ip-address` set to one that the other hosts reach"
        ) from error
    port = listener.getsockname()[1]
    server = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    address = f"{host}:{port}"
    _servers[address] = server
    return address


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


class ProcessGroups:
    """The world of `place.ranks` ranks and all groups made in it; every rank builds, parks and revives with the others.

    Collectives take tensors on `place.device` only. `deadline`, in seconds, ends every wait, collectives included.
    Raises ClusterError when the rendezvous cannot be reached, ResidencyError when ranks do not come, or when this
    process has a world already (an engine's, say).
    """

    def __init__(self, *, place: Place, deadline: float) -> None:
        if dist.is_initialized():
            raise ResidencyError(
                f"cannot join rank {place.rank} of {place.ranks}: this process is part of another world of "
                f"{dist.get_world_size()} ranks; close that one, or keep the trainer in a process of its own"
            )
        self._place = place
        self._timeout = timedelta(seconds=deadline)
        self._deadline = deadline
        self._device = torch.device("cuda", 0) if place.device == "cuda" else torch.device(place.device)
        if self._device.type == "cuda":
            # A worker sees no GPU but its own.
            torch.cuda.set_device(self._device)
        self._residue = residue_of(self._device)
        self._meeting = MeetingPoint(place=place, prefix=f"world{_joined[place.rendezvous]}/", deadline=deadline)
        self._generation = 0
        self._calls = RecordedGroups(timeout=self._timeout)
        self._alive: set[str] = set()
        self._references = References()
        self._meshes: list[DeviceMesh] = []
        self._followed: list[nn.Module] = []
        self._parked = True
        self._world: Callable[[], dist.ProcessGroup | None] = lambda: None
        self._calls.install()
        try:
            self._begin("join process groups")
        except BaseException:
            self._calls.remove()
            raise

    @property
    def parked(self) -> bool:
        """Whether there are no groups now."""
        return self._parked

    def mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        """A mesh over all ranks, on their devices. Every rank must call it."""
        self._refuse_if_parked("make a device mesh")
        mesh = init_device_mesh(self._device.type, shape, mesh_dim_names=names)
        self._meshes.append(mesh)
        return mesh

    def follow(self, modules: Iterable[nn.Module]) -> None:
        """Modules that FSDP2 shards, or that contain such: they must be told of new groups."""
        self._followed.extend(modules)

    def park(self) -> None:
        """Give back what groups hold; every rank must enter. Nothing when parked.

        Raises ResidencyError naming the ranks that did not come, and then all groups are as before. Raises it too,
        parked, when somebody keeps an old group alive: its memory would not be free.
        """
        if self._parked:
            return
        self._check_ours()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        faults.point("groups.park")
        self._meeting.meet(f"park{self._generation}", "park process groups")
        watched = [(str(group.group_name), weakref.ref(group)) for group in c10d._world.pg_map]
        # A group that others destroyed stays so; when they destroyed the world, all of it was meant to be alive.
        self._alive = {name for name, _ in watched} or self._calls.names
        self._end()
        _check_dead(watched)

    def revive(self) -> None:
        """Make all groups again; every rank must enter, and returns when all can use them. Nothing when not parked.

        Raises ResidencyError naming the ranks that did not come, and is parked then.
        """
        if self._parked:
            self._begin("revive process groups")

    def close(self) -> None:
        """Destroy all groups and record no more; may be called twice. Needs no other rank."""
        self._calls.remove()
        if not self._parked:
            self._end()

    def _begin(self, doing: str) -> None:
        if dist.is_initialized():
            raise ResidencyError(f"cannot {doing}: somebody else made a world meanwhile; destroy that one first")
        faults.point("groups.begin")
        self._meeting.meet(f"begin{self._generation}", doing)
        if self._generation == 0:
            _joined[self._place.rendezvous] += 1
        self._generation += 1
        try:
            with self._residue.holding(GROUPS):
                self._make_world()
                self._calls.replay(alive=self._alive | self._references.names)
                self._references.put_back({str(group.group_name): group for group in c10d._world.pg_map})
                self._first_collective()
        except Exception as error:
            self._end()
            raise ResidencyError(
                f"cannot {doing}: rank {self._place.rank} of {self._place.ranks} failed after all had come: {error}"
            ) from error
        self._parked = False

    def _make_world(self) -> None:
        with _excepthook_kept():
            dist.init_process_group(
                _BACKENDS[self._device.type],
                store=self._meeting.store(f"generation{self._generation}/"),
                rank=self._place.rank,
                world_size=self._place.ranks,
                timeout=self._timeout,
            )
        self._world = weakref.ref(c10d._get_default_group())

    def _first_collective(self) -> None:
        # Every rank must enter: NCCL builds communicators lazily, and then this also says that all ranks are ready.
        ones = torch.ones(1, device=self._device)
        work = dist.all_reduce(ones, async_op=True)
        ends = time.monotonic() + self._deadline
        while not work.is_completed():
            if time.monotonic() > ends:
                raise ResidencyError(f"the first collective did not end within {self._deadline:g} s")
            time.sleep(0.0005)
        work.wait()
        if ones.item() != self._place.ranks:
            raise ResidencyError(f"the first collective counted {ones.item():g} of {self._place.ranks} ranks")

    def _end(self) -> None:
        """Destroy our world, if it is still there, with all references to its groups that are known."""
        self._references.take_out([*self._roots(), *owners_of_groups(self._followed)])
        if self._is_ours():
            with self._residue.holding(GROUPS):
                dist.destroy_process_group()
        self._parked = True

    def _roots(self) -> Iterator[DeviceMesh]:
        infos = [owner for owner in owners_of_groups(self._followed) if "mesh" in vars(owner)]
        found = [*self._meshes, *(info.mesh for info in infos)]
        for mesh in {id(mesh): mesh for mesh in found}.values():
            yield mesh
            if vars(mesh).get("_root_mesh") is not None:
                yield vars(mesh)["_root_mesh"]

    def _is_ours(self) -> bool:
        return dist.is_initialized() and self._world() is c10d._get_default_group()

    def _check_ours(self) -> None:
        if not dist.is_initialized():
            return
        if not self._is_ours():
            raise ResidencyError("cannot park process groups: this process is part of a world that others made")
        strange = {str(name) for name in c10d._world.pg_names.values()} - self._calls.names
        strange -= {str(c10d._get_default_group().group_name)}
        if strange:
            raise ResidencyError(
                f"cannot park process groups: {sorted(strange)} were not made by `new_group`, so they could not be "
                "made again; bind no `device_id`, and make groups by `new_group` or a device mesh"
            )

    def _refuse_if_parked(self, doing: str) -> None:
        if self._parked:
            raise ResidencyError(f"cannot {doing}: process groups are parked; revive them first")


@contextlib.contextmanager
def _excepthook_kept() -> Iterator[None]:
    # Each new world lays a hook around the last one's, for ever.
    kept = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = kept


def _check_dead(watched: list[tuple[str, Any]]) -> None:
    if not any(reference() for _, reference in watched):
        return
    gc.collect()
    alive = {name: _holders(reference()) for name, reference in watched if reference() is not None}
    if alive:
        raise ResidencyError(
            f"process groups are parked, but not all of their memory is free: somebody still holds {alive}; `follow` "
            "the modules that use them, and keep no group of your own"
        )


def _holders(group: Any) -> list[str]:
    return sorted({type(holder).__name__ for holder in gc.get_referrers(group)} - {"frame"})
