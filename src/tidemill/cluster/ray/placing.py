"""Where workers of each role go: bundles of resources that Ray sets aside for the run, all or none.

Colocated, a bundle holds a trainer rank and the engine replica of the same number, which share its GPU. Separate, each
has one of its own. Ranks are numbered host by host, so that neighbours in number are neighbours in the machine; first
come those whose bundle has more in it, for a replica too.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from tidemill.errors import ClusterError

__all__ = ["Demand", "Reservation", "Spot", "by_host", "reserve", "seated", "shortage"]

_LEAST_CPU = 0.001  # Ray wants every bundle to ask for something; GPUs are something
_PLACED = 30.0  # seconds


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a run needs. `cpus` and `gpus` are for each process that does not share."""

    ranks: int
    replicas: int
    colocated: bool
    cpus: float
    gpus: int

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Resources of each bundle."""
        if self.colocated:
            both = min(self.ranks, self.replicas)
            alone = max(self.ranks, self.replicas) - both
            return [self._bundle(2)] * both + [self._bundle(1)] * alone
        return [self._bundle(1)] * (self.ranks + self.replicas)

    def _bundle(self, workers: int) -> dict[str, float]:
        asked = {"CPU": self._cpus * workers, "GPU": float(self.gpus)}
        return {name: amount for name, amount in asked.items() if amount}

    @property
    def _cpus(self) -> float:
        return self.cpus if self.gpus else max(self.cpus, _LEAST_CPU)

    @property
    def worker(self) -> dict[str, float]:
        """What one worker takes of its bundle, as `num_cpus` and `num_gpus` of an actor."""
        share = self.gpus / 2 if self.colocated else float(self.gpus)
        return {"num_cpus": self._cpus, "num_gpus": share}

    def words(self) -> str:
        """Who is to be placed."""
        roles = {"trainer rank": self.ranks, "engine replica": self.replicas}
        counted = [_counted(count, what) for what, count in roles.items() if count]
        how = ", sharing GPUs" if self.colocated else ", each with a GPU of its own"
        return " and ".join(counted) + (how if self.gpus and len(counted) > 1 else "")

    def total(self, resource: str) -> float:
        """`CPU` or `GPU` of all bundles."""
        return sum(bundle.get(resource, 0) for bundle in self.bundles)


def shortage(demand: Demand, there: Mapping[str, float]) -> str:
    """In words, what a cluster with the resources `there` has too little of; empty when it has enough of each."""
    for resource, lower in (("GPU", "trainer.ranks or engine.replicas"), ("CPU", "cluster.cpus")):
        asked, has = demand.total(resource), there.get(resource, 0.0)
        if asked > has:
            share = ', or use cluster.placement = "colocated"' if resource == "GPU" and not demand.colocated else ""
            return (
                f"the Ray cluster has {has:g} {resource}s, and {asked:g} are needed for {demand.words()}; "
                f"lower {lower}{share}, or add hosts"
            )
    return ""


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


@dataclass(frozen=True, kw_only=True)
class Spot:
    """One worker's place: bundle number `bundle`, on a host whose node id and IP address these are."""

    bundle: int
    node: str
    ip: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Reservation:
    """Bundles that are this run's."""

    group: PlacementGroup
    trainer: Sequence[Spot]
    engine: Sequence[Spot]

    def release(self) -> None:
        """Give them back; whatever still runs in them is killed."""
        remove_placement_group(self.group)


def reserve(demand: Demand) -> Reservation:
    """Set the bundles aside. Raises ClusterError when the cluster is too small, or too busy for half a minute."""
    if short := shortage(demand, ray.cluster_resources()):
        raise ClusterError(f"cannot place this run: {short}")
    group = placement_group(demand.bundles, strategy="PACK")
    ends = time.monotonic() + _PLACED
    while not group.wait(0.2):
        if time.monotonic() > ends:
            remove_placement_group(group)
            raise ClusterError(_busy(demand))
    nodes = placement_group_table(group)["bundles_to_node_id"]
    ips = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
    spots = [Spot(bundle=index, node=node, ip=ips[node]) for index, node in sorted(nodes.items())]
    trainer, engine = seated(demand, spots)
    return Reservation(group=group, trainer=trainer, engine=engine)


def _busy(demand: Demand) -> str:
    free, has = ray.available_resources(), ray.cluster_resources()
    parts = [
        f"{demand.total(name):g} {name}s are needed, {free.get(name, 0.0):g} of {has.get(name, 0.0):g} are free"
        for name in ("GPU", "CPU")
        if demand.total(name) and (name == "GPU" or demand.cpus)
    ]
    return (
        f"cannot place this run: {' and '.join(parts) or 'no host takes its processes'}, counted over all hosts; "
        "wait for other jobs to end (`ray status` shows them), or ask for less"
    )


def seated(demand: Demand, spots: Sequence[Spot]) -> tuple[list[Spot], list[Spot]]:
    """Where trainer ranks and engine replicas go, by number. `spots` are all bundles, in order."""
    if not demand.colocated:
        return by_host(spots[: demand.ranks]), by_host(spots[demand.ranks :])
    sizes = [sum(bundle.values()) for bundle in demand.bundles]
    # Bundles for two come first, wherever they are: the others have room for a single worker.
    ordered = sorted(by_host(spots), key=lambda spot: -sizes[spot.bundle])
    return ordered[: demand.ranks], ordered[: demand.replicas]


def by_host(spots: Sequence[Spot]) -> list[Spot]:
    """Host by host, the host of the lowest bundle first."""
    first: dict[str, int] = {}
    for spot in sorted(spots, key=lambda spot: spot.bundle):
        first.setdefault(spot.node, spot.bundle)
    return sorted(spots, key=lambda spot: (first[spot.node], spot.bundle))
