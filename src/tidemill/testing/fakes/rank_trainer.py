"""One rank of a trainer that is a few numbers: each rank owns some rows, and all of them must meet at every step.

They meet at the store of `Place.rendezvous`, with a deadline, and use no process group: what a rank does when another
one does not come is what a real one does. Every result is a pure function of weights and inputs.
"""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tidemill import faults
from tidemill.algorithms.deal import deal, put_back
from tidemill.contracts.algorithm import Loss
from tidemill.contracts.batch import Batch, StepReport
from tidemill.contracts.checkpoint import Saved, Snapshot, TensorBytes
from tidemill.contracts.events import Emit, Notice
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Moved
from tidemill.contracts.workers import Place
from tidemill.errors import CheckpointError, ResidencyError, TrainerError
from tidemill.testing.fakes.device import Array, FakeTenant
from tidemill.testing.fakes.policy import digest

__all__ = ["FakeRankTrainer", "build_fake_rank"]

SHAPE = (5, 3)
WORDS = 32
_MEETING = 20.0  # seconds that a rank waits for the others
_WEIGHTS = ("v", "w")
_STATE = tuple(f"{kind}/{name}" for kind in ("model", "optimizer/momentum") for name in _WEIGHTS)


class _Meeting:
    """Every rank's word, at every rank, in the order in which each comes to speak."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._round = 0
        self._store: TCPStore | None = None
        if place.ranks > 1:
            host, _, port = place.rendezvous.rpartition(":")
            self._store = TCPStore(
                host,
                int(port),
                is_master=False,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=_MEETING),
            )

    def exchange(self, word: bytes) -> list[bytes]:
        """A collective."""
        if self._store is None:
            return [word]
        self._round += 1
        self._store.set(f"{self._round}/{self._place.rank}", word)  # type: ignore[arg-type]
        return [self._store.get(f"{self._round}/{rank}") for rank in range(self._place.ranks)]


class FakeRankTrainer(FakeTenant):
    """Rows of two matrices and their momenta. Ranks are `replicas` times as many as shards; the first saves."""

    def __init__(self, place: Place, emit: Emit, *, minibatches: int = 2, replicas: int = 1) -> None:
        super().__init__("trainer", {Part.WEIGHTS: 100, Part.OPTIMIZER: 200, Part.GRADS: 50}, keeps=Part.ALL)
        shards = place.ranks // replicas
        self.rows = np.array_split(np.arange(SHAPE[0]), shards)[place.rank % shards]
        self.saves = place.rank < shards
        self._spread = {"ranks": place.ranks, "replicas": replicas}
        self.shards = shards
        self.minibatches = minibatches
        self.vocabulary = WORDS
        self.place, self.emit = place, emit
        self.meeting = _Meeting(place)
        self.device = {name: np.zeros((len(self.rows), SHAPE[1])) for name in _STATE}
        self.awake = Part.ALL
        self.parked = False
        self.phase, self.updates, self.version, self.sealed = "", 0, 0, -1
        self.torn = False

    def wake_up(self, part: Part) -> Moved:
        """Needs no other rank."""
        faults.point("fake.wake_up")
        return super().wake_up(part)

    def sleep(self) -> Moved:
        """Needs no other rank."""
        faults.point("fake.sleep")
        moved = super().sleep()
        self.sealed = self.version
        return moved

    def park(self) -> None:
        """Every rank meets the others."""
        faults.point("fake.park")
        if not self.parked:
            self.meeting.exchange(b"park")
        self.parked = True

    def revive(self) -> None:
        """Every rank meets the others."""
        faults.point("fake.revive")
        if self.parked:
            self.meeting.exchange(b"revive")
        self.parked = False

    def _check(self, part: Part, doing: str) -> None:
        self.gate.check(part, doing)
        if self.parked or part & Part.WEIGHTS & ~self.awake:
            raise ResidencyError(f"trainer cannot {doing}: it is asleep, or its groups are parked")

    def begin(self, phase: str) -> None:
        """Fresh momentum, unless the phase is under way."""
        self._check(Part.ALL, "begin")
        if phase not in ("warm_up", "rl"):
            raise TrainerError(f"cannot begin {phase!r}")
        if phase != self.phase:
            self.version += 1
            self.phase, self.updates = phase, 0
            for name in _WEIGHTS:
                self.on_device(f"optimizer/momentum/{name}")[:] = 0.0

    def step(self, batch: Batch, loss: Loss) -> StepReport:
        """Of a trainer of one rank."""
        self._check(Part.ALL, "step")
        own = deal(batch, ranks=1, minibatches=self.minibatches)[0]
        report = self.update([share.batch for share in own], loss)
        return replace(report, logprobs=put_back(own, [report.logprobs], tokens=batch.tokens))

    def update(self, minibatches: Sequence[Batch], loss: Loss) -> StepReport:
        """Moves by what all ranks saw of each minibatch, if they saw anything."""
        self._check(Part.ALL, "step")
        self._refuse_if_torn()
        if not self.phase:
            raise TrainerError("cannot step: no phase has begun")
        moved = 0
        for batch in minibatches:
            faults.point("fake.update")
            seen = self.meeting.exchange(_seen(batch))
            if any(seen):
                self.torn = True  # until the last of them
                self._move(np.random.default_rng(digest(seen, self.updates)).standard_normal(SHAPE))
                moved += 1
        faults.point("fake.updated")
        self.torn = False
        self.updates += 1
        self.emit(Notice(text=f"rank {self.place.rank} updated"))
        tokens = sum(int(word) for word in self.meeting.exchange(str(sum(b.tokens for b in minibatches)).encode()))
        metrics = {"policy/updates": float(moved), "train/tokens": float(tokens)}
        logprobs = np.concatenate([_logprobs(batch) * batch.loss_mask for batch in minibatches])
        return StepReport(metrics=metrics, logprobs=logprobs, skipped="" if moved else "no token was left to train on")

    def _move(self, by: Array) -> None:
        for rate, name in enumerate(_WEIGHTS, start=1):
            weights, momentum = self.on_device(f"model/{name}"), self.on_device(f"optimizer/momentum/{name}")
            momentum[:] = 0.9 * momentum + by[self.rows]
            weights += 0.1 * rate * momentum
        self.version += 1

    def _refuse_if_torn(self) -> None:
        if self.torn:
            raise TrainerError("cannot go on: a step failed between two of its updates")

    def log_probs(self, batch: Batch) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
        """Of each token by what it is and what came before it in its row. A collective."""
        self._check(Part.WEIGHTS, "log_probs")
        self.meeting.exchange(b"log_probs")
        return _logprobs(batch)

    def weight_specs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Of the two weights."""
        return dict.fromkeys(_WEIGHTS, ("F64", SHAPE))

    def named_weights(self) -> "Iterator[tuple[str, torch.Tensor]]":
        """The rows of all ranks, gathered at each of them."""
        self._check(Part.WEIGHTS, "named_weights")
        return self._gathered()

    def _gathered(self) -> "Iterator[tuple[str, torch.Tensor]]":
        for name in _WEIGHTS:
            pieces = self.meeting.exchange(self.on_device(f"model/{name}").tobytes())[: self.shards]
            yield name, torch.tensor(np.frombuffer(b"".join(pieces), np.float64).reshape(SHAPE))

    def snapshot(self) -> Snapshot:
        """The host copy, or one of the device when that has changed since. No collective."""
        faults.point("fake.snapshot")
        self._refuse_if_torn()
        if self.awake != Part.NONE and self.sealed != self.version:
            self.gate.check(Part.ALL, "snapshot")
        source = self.device if self.awake != Part.NONE else self.host
        offset = (int(self.rows[0]) if len(self.rows) else 0, 0)
        tensors = {
            name: TensorBytes(
                dtype="F64", shape=array.shape, data=memoryview(array.tobytes()), whole=SHAPE, offset=offset
            )
            for name, array in source.items()
            if self.saves and array.size
        }
        return Snapshot(tensors=tensors, extra={"phase": self.phase, "updates": self.updates} | self._spread)

    def load(self, saved: Saved) -> None:
        """This rank's rows of each."""
        self._check(Part.ALL, "load")
        faults.point("fake.load")
        if set(saved.tensors) != set(_STATE) or any(tensor.shape != SHAPE for tensor in saved.tensors.values()):
            raise CheckpointError(f"cannot load the trainer: it has {sorted(_STATE)}, not {sorted(saved.tensors)}")
        shape = (len(self.rows), SHAPE[1])
        offset = (int(self.rows[0]) if len(self.rows) else 0, 0)
        for name, tensor in saved.tensors.items():
            self.device[name] = np.frombuffer(tensor.read(offset, shape), np.float64).reshape(shape).copy()
        self.phase, self.updates = saved.extra["phase"], saved.extra["updates"]
        self.version += 1
        self.torn = False

    def close(self) -> None:
        """Nothing is held."""


def _seen(batch: Batch) -> bytes:
    """What a rank tells of its share; nothing when no token of it is trained on."""
    if not batch.loss_mask.any():
        return b""
    return str(digest(batch.token_ids.tolist(), batch.advantages.tolist(), batch.logprobs.tolist())).encode()


def _logprobs(batch: Batch) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    found = np.zeros(batch.tokens, np.float32)
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        found[start + 1 : end] = -1.0 - 0.01 * np.cumsum(batch.token_ids[start:end])[1:]
    return found


def build_fake_rank(place: Place, emit: Emit) -> FakeRankTrainer:
    """With settings of its own: a `BuildTrainer`."""
    return FakeRankTrainer(place, emit)
