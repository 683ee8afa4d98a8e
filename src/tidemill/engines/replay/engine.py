"""The engine of a run that trains on dumped rollouts: it holds nothing, and refuses to generate."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tidemill.contracts.engine import Completion, Request, Sampling
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Gate, Moved
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.weights import EVERY_WEIGHT, Sample, WeightReceiver, WeightSource
from tidemill.errors import EngineError
from tidemill.residency.gate import TenantGate

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NoWeightSync", "ReplayEngine"]


class ReplayEngine:
    """A tenant of no bytes."""

    name = "engine"
    dtype = "float32"

    def __init__(self) -> None:
        self.gate: Gate = TenantGate(self.name)
        self.version: PolicyVersion | None = None

    def resident(self) -> Part:
        """Nothing."""
        return Part.NONE

    def footprint(self, part: Part) -> int:
        """No bytes."""
        return 0

    def host_bytes(self) -> int:
        """No bytes."""
        return 0

    def wake_up(self, part: Part) -> Moved:
        """There is nothing to wake."""
        return Moved()

    def sleep(self) -> Moved:
        """There is nothing to put to sleep."""
        return Moved()

    def begin_update(self) -> None:
        """Nothing to close."""

    def load_weights(self, tensors: "Iterable[tuple[str, Tensor]]") -> None:
        """Nowhere to put them."""

    def weight_checksums(self, sample: Sample = EVERY_WEIGHT) -> Mapping[str, int]:
        """Of nothing."""
        return {}

    def publish(self, version: PolicyVersion) -> None:
        """Nobody asks for it."""

    def load_pretrained(self, version: PolicyVersion) -> None:
        """Raises EngineError: a replay has no model."""
        raise EngineError(
            f"cannot load the model's own weights as version {version}: this run replays dumped rollouts and built no "
            "engine; unset rollout.replay to generate"
        )

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Raises EngineError: a replay generates nothing."""
        raise EngineError(
            f"cannot generate {len(requests)} answers: this run replays dumped rollouts and built no engine; "
            "unset rollout.replay to generate"
        )


class NoWeightSync:
    """Hands nothing over: nobody samples from the weights of a replay."""

    def update_weights(self, trainer: WeightSource, engine: WeightReceiver, version: PolicyVersion) -> None:
        """Nothing to do."""
