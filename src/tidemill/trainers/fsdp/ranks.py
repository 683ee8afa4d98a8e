"""The ranks that train one model: how they add up numbers, and the process groups that they do it with.

Numbers are gathered from all ranks and added in the order of ranks, so that every rank has the same bits and none can
decide otherwise than the others.
"""

from collections.abc import Iterable
from typing import Protocol

from jaxtyping import Float64
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tidemill.contracts.workers import Place
from tidemill.errors import TrainerError
from tidemill.residency.groups import ProcessGroups
from tidemill.trainers.fsdp.gathering import all_gathered

__all__ = ["REPLICA", "SHARD", "Alone", "Ranks", "Together"]

REPLICA, SHARD = "replica", "shard"
"""Names of the dimensions of a mesh: copies of the model, and the ranks that one of them is cut over."""


class Ranks(Protocol):
    """This one is `rank` of `count`; `shards` of them hold one copy of the model, those below `shards` the first."""

    rank: int
    count: int
    shards: int

    def gather(self, values: Float64[Tensor, " K"]) -> Float64[Tensor, "W K"]:
        """The values of all ranks, by rank; a collective. On the device that the values are on."""
        ...

    def park(self) -> None:
        """See RankTrainer."""
        ...

    def revive(self) -> None:
        """See RankTrainer."""
        ...

    def close(self) -> None:
        """End process groups; may be called twice."""
        ...


class Alone:
    """The one rank there is: no process group exists."""

    rank = 0
    count = 1
    shards = 1

    def gather(self, values: Float64[Tensor, " K"]) -> Float64[Tensor, "W K"]:
        """What was given."""
        return values[None]

    def park(self) -> None:
        """Nothing."""

    def revive(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Together:
    """Several ranks. Every one builds it at the same time."""

    def __init__(self, *, place: Place, replicas: int, deadline: float) -> None:
        """Raises TrainerError when `replicas` do not divide the ranks, and what ProcessGroups raises."""
        if replicas < 1 or place.ranks % replicas:
            raise TrainerError(
                f"cannot train {replicas} copies of a model on {place.ranks} ranks: each needs equally many; choose "
                "trainer.replicas so that it divides trainer.ranks"
            )
        self.rank, self.count = place.rank, place.ranks
        self.shards = place.ranks // replicas
        self._groups = ProcessGroups(place=place, deadline=deadline)
        shape, names = ((self.shards,), (SHARD,)) if replicas == 1 else ((replicas, self.shards), (REPLICA, SHARD))
        self.mesh: DeviceMesh = self._groups.mesh(shape, names)

    def follow(self, modules: Iterable[nn.Module]) -> None:
        """See ProcessGroups."""
        self._groups.follow(modules)

    def gather(self, values: Float64[Tensor, " K"]) -> Float64[Tensor, "W K"]:
        """See Ranks."""
        return all_gathered(values, count=self.count)

    def park(self) -> None:
        """See RankTrainer."""
        self._groups.park()

    def revive(self) -> None:
        """See RankTrainer."""
        self._groups.revive()

    def close(self) -> None:
        """See Ranks."""
        self._groups.close()
