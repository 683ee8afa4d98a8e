"""From reserved places to workers that can be called: started, compared, told where to write, built."""

import contextlib
import functools
import platform
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tidemill import faults
from tidemill.cluster.ray.actor import HostFacts, RayWorker, Start
from tidemill.cluster.ray.group import Member, RayGroup, end
from tidemill.cluster.ray.placing import Spot
from tidemill.cluster.ray.versions import disagreement, versions
from tidemill.cluster.ray.waiting import SLICE, fetched, ready
from tidemill.cluster.worker import MakeService
from tidemill.contracts.events import Emit
from tidemill.contracts.workers import Place
from tidemill.errors import ClusterError
from tidemill.units import format_seconds

__all__ = ["Role", "build_services", "start_workers"]

_START = 180.0  # seconds for a process to start and import what it needs


@dataclass(frozen=True, kw_only=True, eq=False)
class Role:
    """Workers of one kind, and what they are told. `takes` are num_cpus and num_gpus of one."""

    name: str
    group: PlacementGroup
    spots: Sequence[Spot]
    takes: dict[str, float]
    device: str
    seed: int
    threads: int
    log_folder: Path

    @property
    def names(self) -> list[str]:
        """`trainer-0`, `trainer-1`, ..."""
        return [f"{self.name}-{index}" for index in range(len(self.spots))]

    @property
    def alone(self) -> bool:
        """Whether all are on one host."""
        return len({spot.node for spot in self.spots}) == 1


@dataclass(frozen=True, kw_only=True, eq=False)
class _Seat:
    """One worker that is being started."""

    role: Role
    name: str
    spot: Spot
    actor: ActorHandle


def start_workers(roles: Sequence[Role], *, emit: Emit, check: Callable[[], None]) -> list[RayGroup]:
    """Actors that are ready to build, a group a role; all start at the same time.

    Raises ClusterError when a host cannot take part, before anything is built; then no actor is left.
    """
    seats = [
        _Seat(role=role, name=name, spot=spot, actor=_actor(role, spot))
        for role in roles
        for name, spot in zip(role.names, role.spots, strict=True)
    ]
    members = _members(seats, check, fault_text=faults.told())
    groups, start = [], 0
    for role in roles:
        mine, start = members[start : start + len(role.spots)], start + len(role.spots)
        groups.append(RayGroup(mine, emit=emit, check=check, renew=functools.partial(_renewed, role, check)))
    return groups


def _renewed(role: Role, check: Callable[[], None], worker: int) -> Member:
    """Another actor where this one was: its place is reserved for the length of the run. No fault is armed in it."""
    seat = _Seat(role=role, name=role.names[worker], spot=role.spots[worker], actor=_actor(role, role.spots[worker]))
    (member,) = _members([seat], check, fault_text="")
    return member


def _members(seats: Sequence[_Seat], check: Callable[[], None], *, fault_text: str) -> list[Member]:
    """Who they are, once each is prepared. Raises ClusterError; then none is left."""
    try:
        facts: list[HostFacts] = _answers(seats, [seat.actor.facts.remote() for seat in seats], check)
        _refuse_other_versions(facts)
        with _token(seats[0].role.log_folder) as token:
            starts = [_start(seat, token, fault_text) for seat in seats]
            told = [seat.actor.prepare.remote(start) for seat, start in zip(seats, starts, strict=True)]
            _refuse_unusable(seats, facts, _answers(seats, told, check))
    except BaseException:
        for seat in seats:
            end(seat.actor)
        raise
    return [
        Member(name=seat.name, host=_host(fact), node=seat.spot.node, pid=fact.pid, actor=seat.actor, log=start.log)
        for seat, fact, start in zip(seats, facts, starts, strict=True)
    ]


def build_services(role: Role, group: RayGroup, make: MakeService, *, meet: bool, deadline: float) -> None:
    """Make a service in each worker; `meet` gives them a rendezvous for process groups. Ends the workers on failure."""
    try:
        rendezvous = ""
        if meet:
            host = "127.0.0.1" if role.alone else role.spots[0].ip
            rendezvous = group.ask(0, "open_rendezvous", host, doing="open a rendezvous").result(_START)
        ranks = len(role.spots)
        places = [Place(rank=rank, ranks=ranks, device=role.device, rendezvous=rendezvous) for rank in range(ranks)]
        what = f"build the {role.name}"
        asked = [group.build(rank, make, place, doing=what) for rank, place in enumerate(places)]
        group.gather(asked, deadline=deadline, doing=what)
    except BaseException:
        group.close()
        raise


def _actor(role: Role, spot: Spot) -> ActorHandle:
    where = PlacementGroupSchedulingStrategy(
        placement_group=role.group,
        placement_group_bundle_index=spot.bundle,
        placement_group_capture_child_tasks=False,
    )
    options = {**role.takes, "scheduling_strategy": where, "concurrency_groups": {"control": 1}}
    handle: ActorHandle = ray.remote(**options)(RayWorker).remote()
    return handle


def _start(seat: _Seat, token: tuple[Path, str], fault_text: str) -> Start:
    role = seat.role
    return Start(
        name=seat.name,
        device=role.device,
        seed=role.seed,
        threads=role.threads,
        beside=Counter(spot.node for spot in role.spots)[seat.spot.node],
        fault_text=fault_text,
        search_path=(str(Path.cwd()), *filter(None, sys.path)),
        log=role.log_folder / f"{seat.name}.log",
        token=token,
        alone=role.alone,
        ip=seat.spot.ip,
    )


def _host(facts: HostFacts) -> str:
    return f"{facts.host} ({facts.ip})"


def _refuse_other_versions(facts: Sequence[HostFacts]) -> None:
    workers = [(_host(fact), fact.versions) for fact in facts]
    if differing := disagreement((platform.node(), versions()), workers):
        raise ClusterError(f"cannot use hosts that differ: {differing}; install the same versions on both")


def _refuse_unusable(seats: Sequence[_Seat], facts: Sequence[HostFacts], why: Sequence[str]) -> None:
    for seat, fact, reason in zip(seats, facts, why, strict=True):
        if "sees no GPU" in reason:
            raise ClusterError(
                f"cannot use {_host(fact)} for {seat.name} on cuda: {reason}; install a PyTorch for its GPUs, or set "
                "run.device = cpu"
            )
        if reason:
            raise ClusterError(
                f"cannot use {_host(fact)} for {seat.name}: it cannot use the run folder "
                f"{seat.role.log_folder.parent}: {reason}; put run.dir on a file system that every host sees under the "
                "same path"
            )


@contextlib.contextmanager
def _token(folder: Path) -> Any:
    """A file that only who sees this very folder can read."""
    folder.mkdir(parents=True, exist_ok=True)
    path, text = folder / f".seen-{secrets.token_hex(8)}", secrets.token_hex(16)
    path.write_text(text)
    try:
        yield path, text
    finally:
        path.unlink(missing_ok=True)


def _answers(seats: Sequence[_Seat], references: Sequence[Any], check: Callable[[], None]) -> list[Any]:
    """Values of calls to workers that are not called through a group yet. Raises ClusterError."""
    ends = time.monotonic() + _START
    values: dict[int, Any] = {}
    while len(values) < len(references):
        check()
        left = [index for index in range(len(references)) if index not in values]
        if time.monotonic() > ends:
            raise ClusterError(
                f"cannot start {', '.join(seats[index].name for index in left)}: no answer within "
                f"{format_seconds(_START)}; see what keeps their hosts busy"
            )
        ready([references[index] for index in left], SLICE)
        values |= {index: _value(seats[index], references[index]) for index in left if ready([references[index]], 0.0)}
    return [values[index] for index in range(len(references))]


def _value(seat: _Seat, reference: Any) -> Any:
    try:
        return fetched(reference, _START)
    except RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        failure = ClusterError(
            f"cannot start {seat.name} on {seat.spot.ip}: {lines[-1]}; install tidemill and what it needs on that "
            "host as on this one"
        )
        failure.add_note("\n".join(lines))
        raise failure from None
