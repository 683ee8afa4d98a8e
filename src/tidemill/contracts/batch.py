"""Packed trajectories ready for a trainer, and what a step reports.

Arrays are numpy's: this module needs no torch, and another process can read them without a copy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Bool, Float32, Int64

__all__ = ["Batch", "StepReport"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Rows of tokens laid end to end: row `i` is `[offsets[i], offsets[i + 1])`. `N` tokens, `S` rows.

    Position `p` describes token `p` of its row as the outcome of a prediction: `logprobs[p]` is the engine's
    log-probability of that token in nats (0 where not sampled), `loss_mask[p]` says whether it is trained on,
    `advantages[p]` its advantage. The first token of a row is never trained on: nothing predicts it.
    `temperature` is the one at which it was sampled; log-probs are recomputed at it.
    """

    token_ids: "Int64[np.ndarray, ' N']"
    offsets: "Int64[np.ndarray, ' S+1']"
    loss_mask: "Bool[np.ndarray, ' N']"
    logprobs: "Float32[np.ndarray, ' N']"
    advantages: "Float32[np.ndarray, ' N']"
    temperature: float = 1.0
    metrics: Mapping[str, float]

    @property
    def rows(self) -> int:
        """Number of rows, S."""
        return len(self.offsets) - 1

    @property
    def tokens(self) -> int:
        """Number of tokens, N."""
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepReport:
    """What a trainer's step did. `metrics` holds `policy/*` and `train/*`; `skipped` says why no update was made.

    `logprobs` are the trainer's own of the tokens trained on, in nats, under the weights before the first update; 0
    elsewhere. `N` tokens: those of the batch, or of one rank's minibatches laid end to end.
    """

    metrics: Mapping[str, float]
    logprobs: "Float32[np.ndarray, ' N']"
    skipped: str = ""
