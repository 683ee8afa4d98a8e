"""What to learn from groups: advantages and packing on the driver, a pure loss on the trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tidemill.contracts.batch import Batch
from tidemill.contracts.sample import Group

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor

__all__ = ["Algorithm", "Loss", "LossInputs", "LossOutput"]


@dataclass(frozen=True, kw_only=True, eq=False)
class LossInputs:
    """One micro-batch, padded to the right: `B` rows of `T` predicted tokens, all float32. What is not masked in is 0.

    `logprobs` carries the gradient; `old_logprobs` are the trainer's own under the weights before this step's first
    update; `rollout_logprobs` are the engine's. Nats, at the batch's temperature.
    """

    logprobs: "Float[Tensor, 'B T']"
    old_logprobs: "Float[Tensor, 'B T']"
    rollout_logprobs: "Float[Tensor, 'B T']"
    advantages: "Float[Tensor, 'B T']"
    mask: "Bool[Tensor, 'B T']"


@dataclass(frozen=True, kw_only=True, eq=False)
class LossOutput:
    """`numerator` (scalar with gradient) and `count` are summed over micro-batches and ranks and divided once.

    `sums` are detached scalars, added up likewise and divided by the number of masked-in tokens: metrics by name.
    """

    numerator: "Float[Tensor, '']"
    count: float
    sums: "Mapping[str, Float[Tensor, '']]"


class Loss(Protocol):
    """Pure and picklable."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """The loss of one micro-batch. A mask of nothing gives numerator 0 and count 0."""
        ...


class Algorithm(Protocol):
    """A bundle of advantage, packing and loss."""

    @property
    def loss(self) -> Loss:
        """What `Trainer.step` minimises."""
        ...

    def batch(self, groups: Sequence[Group]) -> Batch:
        """Advantages of all groups, packed. Groups that teach nothing are counted in `Batch.metrics`, never NaN."""
        ...
