"""A policy of eight numbers: a trainer that moves them, an engine that samples from them, a sync between the two.

Every result is a pure function of weights and inputs, so that two runs can be compared bit by bit; memory is released
while asleep (see `device.py`), so that use without a lease is an exception.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from tidemill.contracts.algorithm import Loss
from tidemill.contracts.batch import Batch, StepReport
from tidemill.contracts.checkpoint import Saved, Snapshot
from tidemill.contracts.engine import Completion, Request, Sampling
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Moved, Residency
from tidemill.contracts.sample import StopReason
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.weights import EVERY_WEIGHT, Sample, WeightReceiver, WeightSource
from tidemill.errors import CheckpointError, WeightSyncError
from tidemill.testing.fakes.device import Array, FakeTenant
from tidemill.testing.fakes.layouts import Layout, Whole

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FakeEngine", "FakeTrainer", "FakeWeightSync"]

SIZE = 8
WHOLE = Whole()


def digest(*values: object) -> int:
    """64 bits that depend on every value."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "big")


class FakeTrainer(FakeTenant):
    """Adds to its weights a number drawn from the batch; a momentum makes forgotten optimizer state show."""

    def __init__(self, layout: Layout = WHOLE) -> None:
        super().__init__("trainer", {Part.WEIGHTS: 100, Part.OPTIMIZER: 200}, keeps=Part.ALL)
        self.host = {"model/w": np.zeros(SIZE), "optimizer/momentum/w": np.zeros(SIZE)}
        self.layout = layout
        self.phase = ""
        self.updates = 0

    def begin(self, phase: str) -> None:
        """Fresh momentum, unless the phase is under way."""
        self.gate.check(Part.ALL, "begin a phase")
        if phase == self.phase:
            return
        self.phase, self.updates = phase, 0
        self.on_device("optimizer/momentum/w")[:] = 0.0

    def step(self, batch: Batch, loss: Loss) -> StepReport:
        """Weights and momentum move by a pure function of both and of the batch."""
        self.gate.check(Part.ALL, "step")
        weights, momentum = self.on_device("model/w"), self.on_device("optimizer/momentum/w")
        seen = digest(batch.token_ids.tolist(), batch.advantages.tolist(), batch.logprobs.tolist(), self.updates)
        momentum[:] = 0.9 * momentum + np.random.default_rng(seen).standard_normal(SIZE)
        weights += 0.1 * momentum
        self.updates += 1
        return StepReport(metrics={"policy/loss": float(weights.sum())}, logprobs=np.zeros(batch.tokens, np.float32))

    def log_probs(self, batch: Batch) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
        """Zeros."""
        self.gate.check(Part.ALL, "compute log-probs")
        return np.zeros(batch.tokens, dtype=np.float32)

    def snapshot(self) -> Snapshot:
        """The host copy when asleep; a copy of the device, under the lease, when awake."""
        if self.awake != Part.NONE:
            self.gate.check(Part.ALL, "snapshot")
        source = self.host if self.awake == Part.NONE else self.device
        return self.layout.snapshot(source, {"phase": self.phase, "updates": self.updates})

    def load(self, saved: Saved) -> None:
        """Both arrays, by name."""
        self.gate.check(Part.ALL, "load")
        if set(saved.tensors) != set(self.device):
            raise CheckpointError(f"cannot load the trainer: it has {sorted(self.device)}, not {sorted(saved.tensors)}")
        for name, tensor in saved.tensors.items():
            self.device[name] = self.layout.read(tensor)
        self.phase, self.updates = saved.extra["phase"], saved.extra["updates"]

    def close(self) -> None:
        """Nothing is held."""

    def weight_specs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Of the one weight."""
        return {"w": ("F64", (SIZE,))}

    def named_weights(self) -> "Iterator[tuple[str, Tensor]]":
        """The weights; the fake sync knows that they are numpy's."""
        self.gate.check(Part.WEIGHTS, "hand out weights")
        return iter([("w", self.on_device("model/w"))])  # type: ignore[list-item]


class FakeEngine(FakeTenant):
    """Samples tokens from a hash of weights, seed, key and position; forgets its weights in sleep."""

    def __init__(self) -> None:
        super().__init__("engine", {Part.WEIGHTS: 100, Part.KV_CACHE: 150}, keeps=Part.NONE)
        self.version: PolicyVersion | None = None
        self.newest = PolicyVersion(-1, -1)

    @property
    def dtype(self) -> str:
        """Of the weights."""
        return "float64"

    def sleep(self) -> Moved:
        """Deep sleep: the weights are gone, the version unknown."""
        moved = super().sleep()
        self.version = None
        return moved

    def begin_update(self) -> None:
        """Closed until `publish`."""
        self.gate.check(Part.WEIGHTS, "begin an update")
        self.version = None
        self.device = {}

    def load_weights(self, tensors: "Iterable[tuple[str, Tensor]]") -> None:
        """Copies."""
        self.gate.check(Part.WEIGHTS, "load weights")
        self.device.update({name: np.array(array) for name, array in tensors})

    def weight_checksums(self, sample: Sample = EVERY_WEIGHT) -> Mapping[str, int]:
        """Of each array."""
        self.gate.check(Part.WEIGHTS, "compute checksums")
        return {name: digest(self.device[name].tobytes()) for name in sample.chosen(self.device)}

    def publish(self, version: PolicyVersion) -> None:
        """Versions never go back."""
        self.gate.check(Part.WEIGHTS, "publish a version")
        if "w" not in self.device:
            raise WeightSyncError(f"cannot publish version {version}: the weight w did not come")
        if version < self.newest:
            raise WeightSyncError(f"cannot publish version {version}: the engine held {self.newest} before")
        self.version = self.newest = version

    def load_pretrained(self, version: PolicyVersion) -> None:
        """The zeros that a trainer begins with."""
        self.begin_update()
        self.load_weights([("w", np.zeros(SIZE))])  # type: ignore[list-item]
        self.publish(version)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Four tokens an answer."""
        self.gate.check(Part.WEIGHTS | Part.KV_CACHE, "generate")
        if self.version is None:
            raise WeightSyncError("cannot generate: the version of the weights is unknown")
        weights = self.on_device("w").tobytes()
        return [self._complete(request, sampling, weights, self.version) for request in requests]

    def _complete(self, request: Request, sampling: Sampling, weights: bytes, version: PolicyVersion) -> Completion:
        draws = [digest(weights, sampling.seed, request.key, request.token_ids, position) for position in range(4)]
        return Completion(
            token_ids=tuple(draw % 10 for draw in draws),
            logprobs=tuple(-(draw % 1000) / 1000 for draw in draws),
            stop_reason=StopReason.EOS,
            version=version,
            text="".join(str(draw % 10) for draw in draws),
        )


class FakeWeightSync:
    """The steps of a sync, without torch."""

    def __init__(self, residency: Residency) -> None:
        self.residency = residency

    def update_weights(self, trainer: WeightSource, engine: WeightReceiver, version: PolicyVersion) -> None:
        """Under the engine's lease: begin, load, compare, publish."""
        with self.residency.awake(cast(FakeEngine, engine), Part.WEIGHTS):
            engine.begin_update()
            engine.load_weights(trainer.named_weights())
            wanted: dict[str, Array] = dict(trainer.named_weights())  # type: ignore[arg-type]
            if engine.weight_checksums() != {name: digest(array.tobytes()) for name, array in wanted.items()}:
                raise WeightSyncError("the engine does not hold the trainer's weights")
            engine.publish(version)
