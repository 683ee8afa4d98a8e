"""Workers as Ray actors, on this machine or on several."""

import contextlib
import functools
import math
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import ray
from ray.exceptions import RayError

from tidemill.cluster.engine_proxy import EngineProxy
from tidemill.cluster.engine_service import EngineService
from tidemill.cluster.ray.actors import Role, build_services, start_workers
from tidemill.cluster.ray.connection import connect, probe, refuse_second_connection
from tidemill.cluster.ray.group import RayGroup
from tidemill.cluster.ray.logs import LogTail
from tidemill.cluster.ray.placing import Demand, Reservation, reserve
from tidemill.cluster.ray.private import PrivateCluster
from tidemill.cluster.ray.waiting import fetched
from tidemill.cluster.tenant_proxy import Deadlines
from tidemill.cluster.trainer_proxy import TrainerProxy
from tidemill.cluster.trainer_service import TrainerService
from tidemill.cluster.weight_shipping import ShippedWeightSync
from tidemill.cluster.worker import MakeService
from tidemill.config.engine import replicas_for
from tidemill.contracts.engine import RolloutEngine
from tidemill.contracts.events import Emit, Notice
from tidemill.contracts.residency import Residency
from tidemill.contracts.trainer import Trainer
from tidemill.contracts.weights import Samples, WeightSync
from tidemill.contracts.workers import BuildEngine, BuildTrainer
from tidemill.errors import ClusterError

__all__ = ["RayCluster"]

_ANSWER = 120.0  # seconds for a short question


class RayCluster:
    """Implements `Cluster`: an actor a rank. Made, it has every process of the run, or has refused to be made.

    `device` is `auto` (the GPUs of the cluster when it has some), `cpu` or `cuda`. `address` is `host:port`, or empty
    for a private cluster. `ranks` is 0 when no trainer is wanted; `replicas` may be `auto`, and 0 for a run without an
    engine.
    """

    def __init__(
        self,
        *,
        device: str,
        ranks: int,
        replicas: int | str,
        max_batch: int,
        seed: int,
        threads: int,
        transition_deadline: float,
        log_folder: Path,
        emit: Emit,
        address: str = "",
        placement: str = "colocated",
        cpus: float = 0.0,
        restarts: int = 3,
        deadline: float = 1800.0,
    ) -> None:
        """Raises ClusterError for a cluster that cannot be reached or started, has too little, or hosts that differ."""
        self._colocated = placement == "colocated"
        self._max_batch, self._restarts, self._emit = max_batch, restarts, emit
        self._deadlines = Deadlines(work=deadline, transition=transition_deadline)
        with contextlib.ExitStack() as undo:
            self._private = _joined_or_private(address, device, cpus, _most_workers(ranks, replicas), self._say, undo)
            self._device = _device(device)
            self._demand = Demand(
                ranks=ranks,
                replicas=replicas_for(replicas, ranks=ranks, shares_gpus=self._colocated and self._device == "cuda"),
                colocated=self._colocated,
                cpus=cpus,
                gpus=1 if self._device == "cuda" else 0,
            )
            # Given back when the driver leaves. To ask for it earlier would wait for a cluster that is gone.
            reservation = reserve(self._demand)
            emit(Notice(text=_started(reservation, self._demand, self._device, address)))
            logs = LogTail(emit)
            undo.callback(logs.close)
            self._places = self._roles(reservation, seed=seed, threads=threads, log_folder=log_folder)
            for role in self._places.values():
                for worker in role.names:
                    logs.add(worker, log_folder / f"{worker}.log")
            groups = start_workers(list(self._places.values()), emit=emit, check=self._check)
            self._groups = dict(zip(self._places, groups, strict=True))
            for group in groups:
                undo.callback(group.close)
            self._undo = undo.pop_all()

    @property
    def device(self) -> str:
        """`cpu` or `cuda`."""
        return self._device

    @property
    def shares_devices(self) -> bool:
        """True when colocated."""
        return self._colocated

    def trainer(self, build: BuildTrainer, *, ranks: int) -> Trainer:
        """See Cluster."""
        group = self._built("trainer", ranks, functools.partial(TrainerService, build), meet=ranks > 1)
        self._trainer = TrainerProxy(group, deadlines=self._deadlines)
        return self._trainer

    def park_groups(self, parks: bool) -> None:
        """See Cluster."""
        self._trainer.parks = parks

    def engine(self, build: BuildEngine, *, replicas: int) -> RolloutEngine:
        """See Cluster."""
        group = self._built("engine", replicas, functools.partial(EngineService, build), meet=False)
        told = {"max_batch": self._max_batch, "restarts": self._restarts}
        return EngineProxy(group, deadlines=self._deadlines, emit=self._emit, **told)

    def weight_sync(self, residency: Residency, emit: Emit, *, samples: Samples) -> WeightSync:
        """See Cluster."""
        return ShippedWeightSync(residency=residency, emit=emit, samples=samples, words=self.device == "cuda")

    def free_bytes(self) -> int:
        """See Cluster. On a CPU the memory of a host is divided among its workers."""
        members = [member for group in self._groups.values() for member in group.members]
        shares = Counter(member.node for member in members)
        asked = [member.actor.free_bytes.remote(self._device) for member in members]
        try:
            free: list[int] = [fetched(each, _ANSWER) for each in asked]
        except RayError as error:
            raise ClusterError(f"cannot tell what is free on devices: {error}") from error
        if self._device == "cuda":
            return min(free)
        return min(each // shares[member.node] for each, member in zip(free, members, strict=True))

    def close(self) -> None:
        """See Cluster."""
        self._undo.close()

    def _roles(self, reservation: Reservation, *, seed: int, threads: int, log_folder: Path) -> dict[str, Role]:
        spots = {"trainer": reservation.trainer, "engine": reservation.engine}
        return {
            name: Role(
                name=name,
                group=reservation.group,
                spots=places,
                takes=self._demand.worker,
                device=self._device,
                seed=seed,
                threads=threads,
                log_folder=log_folder,
            )
            for name, places in spots.items()
            if places
        }

    def _built(self, name: str, count: int, make: MakeService, *, meet: bool) -> RayGroup:
        held = len(self._places[name].spots) if name in self._places else 0
        if count != held:
            raise ClusterError(f"cannot place {count} processes of the {name}: this cluster was made for {held}")
        group = self._groups[name]
        build_services(self._places[name], group, make, meet=meet, deadline=self._deadlines.work)
        return group

    def _say(self, text: str) -> None:
        self._emit(Notice(text=f"ray | {text}"))

    def _check(self) -> None:
        if self._private is not None:
            self._private.check()


def _started(reservation: Reservation, demand: Demand, device: str, address: str) -> str:
    hosts = len({spot.node for spot in [*reservation.trainer, *reservation.engine]})
    where = "a private Ray cluster" if not address else f"{hosts} host(s) of the Ray cluster at {address}"
    return f"starting {demand.words()}, on {device}, on {where}"


def _joined_or_private(
    address: str,
    device: str,
    cpus: float,
    workers: int,
    say: Callable[[str], None],
    undo: contextlib.ExitStack,
) -> PrivateCluster | None:
    """Connect; `undo` gets what ends it."""
    refuse_second_connection()
    if address:
        probe(address)
        connect(address, private=False, say=say)
        undo.callback(_quietly, ray.shutdown)
        return None
    # No more than is needed: Ray starts idle processes for CPUs that nobody asked for.
    cores = max(1, min(os.cpu_count() or 1, math.ceil(cpus * workers)))
    private = PrivateCluster(cpus=cores, gpus=0 if device == "cpu" else None)
    undo.callback(private.close)
    connect(private.address, private=True, say=say)
    undo.callback(_quietly, ray.shutdown)
    return private


def _quietly(work: Callable[[], None]) -> None:
    """Undo what a cluster that is gone has undone already."""
    with contextlib.suppress(RayError, RuntimeError, ConnectionError):
        work()


def _most_workers(ranks: int, replicas: int | str) -> int:
    return ranks + (replicas if isinstance(replicas, int) else max(1, ranks))


def _device(wanted: str) -> str:
    """`auto` is what the cluster has. Raises ClusterError for GPUs that it has not."""
    gpus = ray.cluster_resources().get("GPU", 0.0)
    if wanted == "cuda" and not gpus:
        raise ClusterError("cannot use run.device = cuda: the Ray cluster has no GPU; set run.device=cpu or auto")
    if wanted != "auto":
        return wanted
    return "cuda" if gpus else "cpu"
