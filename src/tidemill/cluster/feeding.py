"""Which trainer rank feeds which replica of an engine, and by what."""

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.cluster.weight_sender import Carrier
from tidemill.cluster.whereabouts import Whereabouts

__all__ = ["Feeding", "plan_feeding"]


@dataclass(frozen=True, kw_only=True)
class Feeding:
    """`feeder[replica]` is a rank; `carrier[rank]` is how that rank's parcels leave it."""

    feeder: tuple[int, ...]
    carrier: tuple[Carrier, ...]


def plan_feeding(ranks: Sequence[Whereabouts], replicas: Sequence[Whereabouts]) -> Feeding:
    """The nearest rank feeds: on the same GPU, else on the same host, else any; equals take turns.

    A rank hands on its GPU's memory only when all that it feeds are on that GPU: a worker sees no other.
    """
    feeder = tuple(_nearest(ranks, at, turn) for turn, at in enumerate(replicas))
    return Feeding(feeder=feeder, carrier=tuple(_carrier(rank, ranks, replicas, feeder) for rank in range(len(ranks))))


def _nearest(ranks: Sequence[Whereabouts], at: Whereabouts, turn: int) -> int:
    here = [rank for rank, where in enumerate(ranks) if where.shares_gpu(at)]
    near = [rank for rank, where in enumerate(ranks) if where.host == at.host]
    candidates = here or near or list(range(len(ranks)))
    return candidates[turn % len(candidates)]


def _carrier(
    rank: int, ranks: Sequence[Whereabouts], replicas: Sequence[Whereabouts], feeder: Sequence[int]
) -> Carrier:
    fed = [replica for replica, mine in enumerate(feeder) if mine == rank]
    if not fed:
        return "none"
    return "ipc" if all(ranks[rank].shares_gpu(replicas[replica]) for replica in fed) else "bytes"
