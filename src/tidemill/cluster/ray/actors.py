"""From reserved places to workers that can be called: started, compared, told where to write, built."""

import contextlib
import platform
import secrets
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
from tidemill.cluster.ray.group import Member, RayGroup
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


def start_workers(role: Role, *, emit: Emit, check: Callable[[], None]) -> RayGroup:
    """Actors that are ready to build. Raises ClusterError when a host cannot take part; then none is left."""
    actors = [_actor(role, spot) for spot in role.spots]
    try:
        facts: list[HostFacts] = _answers(role, [actor.facts.remote() for actor in actors], check)
        _refuse_other_versions(facts)
        with _token(role.log_folder) as token:
            starts = _starts(role, token)
            told = [actor.prepare.remote(start) for actor, start in zip(actors, starts, strict=True)]
            _refuse_unusable(role, facts, _answers(role, told, check))
    except BaseException:
        for actor in actors:
            ray.kill(actor)
        raise
    members = [
        Member(name=start.name, host=_host(fact), node=spot.node, pid=fact.pid, actor=actor, log=start.log)
        for start, fact, spot, actor in zip(starts, facts, role.spots, actors, strict=True)
    ]
    return RayGroup(members, emit=emit, check=check)


def build_services(role: Role, group: RayGroup, make: MakeService, *, meet: bool, deadline: float) -> None:
    """Make a service in each worker; `meet` gives them a rendezvous for process groups. Ends the workers on failure."""
    try:
        rendezvous = ""
        if meet:
            host = "127.0.0.1" if role.alone else role.spots[0].ip
            rendezvous = group.ask(0, "open_rendezvous", host, doing="open_rendezvous").result(_START)
        ranks = len(role.spots)
        places = [Place(rank=rank, ranks=ranks, device=role.device, rendezvous=rendezvous) for rank in range(ranks)]
        asked = [group.ask(rank, "build", make, place, doing="build") for rank, place in enumerate(places)]
        group.gather(asked, "build", deadline)
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


def _starts(role: Role, token: tuple[Path, str]) -> list[Start]:
    beside = Counter(spot.node for spot in role.spots)
    return [
        Start(
            name=name,
            device=role.device,
            seed=role.seed,
            threads=role.threads,
            beside=beside[spot.node],
            fault_text=faults.told(),
            log=role.log_folder / f"{name}.log",
            token=token,
            alone=role.alone,
            ip=spot.ip,
        )
        for name, spot in zip(role.names, role.spots, strict=True)
    ]


def _host(facts: HostFacts) -> str:
    return f"{facts.host} ({facts.ip})"


def _refuse_other_versions(facts: Sequence[HostFacts]) -> None:
    workers = [(_host(fact), fact.versions) for fact in facts]
    if differing := disagreement((platform.node(), versions()), workers):
        raise ClusterError(f"cannot use hosts that differ: {differing}; install the same versions on both")


def _refuse_unusable(role: Role, facts: Sequence[HostFacts], why: Sequence[str]) -> None:
    for name, fact, reason in zip(role.names, facts, why, strict=True):
        if reason and "sees no GPU" in reason:
            raise ClusterError(
                f"cannot use {_host(fact)} for {name} on cuda: {reason}; install a PyTorch for its GPUs, or set "
                "run.device = cpu"
            )
        if reason:
            raise ClusterError(
                f"cannot use {_host(fact)} for {name}: it cannot use the run folder {role.log_folder.parent}: "
                f"{reason}; put run.dir on a file system that every host sees under the same path"
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


def _answers(role: Role, references: Sequence[Any], check: Callable[[], None]) -> list[Any]:
    """Values of calls to workers that are not called through a group yet. Raises ClusterError."""
    ends = time.monotonic() + _START
    values: dict[int, Any] = {}
    while len(values) < len(references):
        check()
        left = [index for index in range(len(references)) if index not in values]
        if time.monotonic() > ends:
            names = ", ".join(role.names[index] for index in left)
            raise ClusterError(
                f"cannot start {names}: no answer within {format_seconds(_START)}; see what keeps their hosts busy"
            )
        ready([references[index] for index in left], SLICE)
        values |= {index: _value(role, index, references[index]) for index in left if ready([references[index]], 0.0)}
    return [values[index] for index in range(len(references))]


def _value(role: Role, worker: int, reference: Any) -> Any:
    try:
        return fetched(reference, _START)
    except RayError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        failure = ClusterError(
            f"cannot start {role.names[worker]} on {role.spots[worker].ip}: {lines[-1]}; install tidemill and what it "
            "needs on that host as on this one"
        )
        failure.add_note("\n".join(lines))
        raise failure from None
