"""One rank of a trainer in a worker's process, as the driver calls it by method name.

Under the driver's gate, through `use`: everything that computes or moves memory. Beside the call under way, through
`control`: what concerns snapshots that were taken, which lie in host memory and need no device and no other rank.
"""

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.checkpoint.rng import RandomState
from tidemill.cluster.snapshot_desk import SnapshotDesk, Writing
from tidemill.cluster.tenant_service import TenantService
from tidemill.cluster.weight_sender import Carrier, Sent, WeightSender
from tidemill.contracts.algorithm import Loss
from tidemill.contracts.batch import Batch, StepReport
from tidemill.contracts.checkpoint import Places, Saved, TensorSpec
from tidemill.contracts.events import Emit
from tidemill.contracts.footprint import Part
from tidemill.contracts.trainer import RankTrainer
from tidemill.contracts.weights import EVERY_WEIGHT, Sample, WeightSource
from tidemill.contracts.workers import BuildTrainer, Place
from tidemill.errors import CheckpointError, PluginError, RankMissingError, ResidencyError, TrainerError, WorkerError
from tidemill.weights.parcel import Parcel

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float32

__all__ = ["RANK_RANDOM", "REFUSALS", "Taken", "TrainerDescription", "TrainerService"]

RANK_RANDOM = "rank_random"
"""Under this name a checkpoint's `extra` has the random states of every rank's process, in the order of ranks."""

REFUSALS = (CheckpointError, ResidencyError, TrainerError)
"""What a rank raises before it changes anything, or else remembers by itself and raises again."""


@dataclass(frozen=True, kw_only=True)
class TrainerDescription:
    """What never changes of a trainer: see `RankTrainer` and `WeightSource`."""

    vocabulary: int
    minibatches: int
    weight_specs: Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A rank's snapshot, which stays with it; `random` is its process's random state, as JSON values.

    `specs` are None where they are those of the one before.
    """

    specs: Mapping[str, TensorSpec] | None
    extra: Mapping[str, Any]
    random: Mapping[str, Any]


class TrainerService(TenantService):
    """`functools.partial(TrainerService, build)` is what a worker group builds."""

    def __init__(self, build: BuildTrainer, place: Place, emit: Emit) -> None:
        self._trainer = build(place, emit)
        _refuse_half_a_rank(self._trainer)
        super().__init__(self._trainer)
        self._place = place
        self._desk = SnapshotDesk()
        self._sender = WeightSender(self._trainer)
        self._changes = 0
        self._layout: Hashable = None

    def describe_trainer(self) -> TrainerDescription:
        """Asked once, when the worker is made."""
        trainer = self._trainer
        return TrainerDescription(
            vocabulary=trainer.vocabulary, minibatches=trainer.minibatches, weight_specs=dict(trainer.weight_specs())
        )

    def changes(self) -> int:
        """How often `begin`, `update` and `load` may have changed something: ranks are equal while they agree on it."""
        return self._changes

    def park(self) -> None:
        """See RankTrainer. Raises WorkerError that names this rank, or those that did not come."""
        try:
            self._trainer.park()
        except RankMissingError:
            raise
        except Exception as error:
            raise self._of_groups("park", error) from error

    def revive(self) -> None:
        """See RankTrainer. Raises WorkerError that names this rank."""
        try:
            self._trainer.revive()
        except RankMissingError:
            raise
        except Exception as error:
            raise self._of_groups("revive", error) from error

    def _of_groups(self, doing: str, error: Exception) -> WorkerError:
        return WorkerError(
            f"rank {self._place.rank} of {self._trainer.name} could not {doing} its process groups: "
            f"{type(error).__name__}: {error}"
        )

    def begin(self, phase: str) -> None:
        """See Trainer."""
        with self._counted():
            self._trainer.begin(phase)

    def update(self, minibatches: Sequence[Batch], loss: Loss) -> StepReport:
        """See RankTrainer."""
        with self._counted():
            return self._trainer.update(minibatches, loss)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except REFUSALS:
            raise
        except BaseException:
            self._changes += 1
            raise
        self._changes += 1

    def log_probs(self, batch: Batch) -> "Float32[np.ndarray, ' N']":
        """See Trainer; of this rank's rows."""
        return self._trainer.log_probs(batch)

    def load(self, saved: Saved) -> None:
        """See Trainer. This process's random state comes with it, when one was saved of a rank of this number."""
        self._trainer.gate.check(Part.ALL, "load")
        random, before = RandomState(), RandomState().snapshot().extra
        states = saved.extra.get(RANK_RANDOM, ())
        own = states[self._place.rank] if self._place.rank < len(states) else before
        # First, so that a garbled one is refused before anything changes; and last, so that it is what goes on.
        random.load(Saved(tensors={}, extra=own))
        extra = {name: value for name, value in saved.extra.items() if name != RANK_RANDOM}
        try:
            with self._counted():
                self._trainer.load(Saved(tensors=saved.tensors, extra=extra, accept=saved.accept))
        except BaseException:
            random.load(Saved(tensors={}, extra=before))
            raise
        random.load(Saved(tensors={}, extra=own))

    def take_snapshot(self, token: int, known: bool) -> Taken:
        """Keep the present state as number `token`. Without a lease when asleep, or unchanged since it last slept.

        `known`: whoever asks has the specs of the snapshot before, and needs others only.
        """
        snapshot = self._trainer.snapshot()
        self._desk.hold(token, snapshot)
        same = known and snapshot.layout is not None and snapshot.layout == self._layout
        self._layout = snapshot.layout
        return Taken(
            specs=None if same else {name: tensor.spec for name, tensor in snapshot.tensors.items()},
            extra=dict(snapshot.extra),
            random=RandomState().snapshot().extra,
        )

    def write_shard(self, token: int, path: Path, last: Sequence[str], names: Sequence[str]) -> None:
        """See SnapshotDesk."""
        self._desk.write(token, path, last, names)

    def place_shard(self, token: int, places: Places, last: bool) -> None:
        """See SnapshotDesk."""
        self._desk.place(token, places, last)

    def compare_shard(self, token: int, places: Places) -> None:
        """See SnapshotDesk."""
        self._desk.compare(token, places)

    def shard_state(self, token: int) -> Writing:
        """See SnapshotDesk."""
        return self._desk.state(token)

    def abandon_shard(self, token: int) -> None:
        """See SnapshotDesk."""
        self._desk.abandon(token)

    def release_snapshot(self, token: int) -> None:
        """See SnapshotDesk."""
        self._desk.release(token)

    def open_shipment(self, dtype: str, bucket_bytes: int, carrier: Carrier, sample: Sample = EVERY_WEIGHT) -> bool:
        """See WeightSender. Buffers lie on the device too: the lease comes before them."""
        self._trainer.gate.check(Part.WEIGHTS, "named_weights")
        return self._sender.open_shipment(dtype, bucket_bytes, carrier, sample)

    def next_parcel(self) -> bool:
        """See WeightSender. Under the lease at each call: between two, memory may have gone."""
        self._trainer.gate.check(Part.WEIGHTS, "named_weights")
        return self._sender.next_parcel()

    def take_parcel(self) -> Parcel:
        """See WeightSender."""
        self._trainer.gate.check(Part.WEIGHTS, "named_weights")
        return self._sender.take_parcel()

    def close_shipment(self) -> Sent:
        """See WeightSender."""
        return self._sender.close_shipment()


def _refuse_half_a_rank(trainer: object) -> None:
    """Raises PluginError for a trainer made for one process: it lacks what the driver calls of a rank."""
    wanted = {name for kind in (RankTrainer, WeightSource) for name in vars(kind) if not name.startswith("_")}
    if missing := sorted(name for name in wanted if not hasattr(trainer, name)):
        kind = type(trainer)
        raise PluginError(
            f"cannot use {kind.__module__}:{kind.__qualname__} for ranks of a trainer: it has no {', '.join(missing)}; "
            'define them as tidemill.contracts.trainer:RankTrainer says, or set cluster.use = "inline"'
        )
