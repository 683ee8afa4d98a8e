"""How far the engine's log-probs are from the trainer's, for the same tokens under what should be the same weights.

`N` tokens of a batch, `M` of them compared. A difference is the trainer's minus the engine's, in nats: the logarithm of
the ratio of their probabilities, held within +-20 where it is exponentiated.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Float64, Int64

from tidemill.contracts.batch import Batch

__all__ = ["APART", "Mismatch", "compare"]

APART = 0.1
"""Nats beyond which a token counts as apart: a ratio below 0.905 or above 1.105."""
_LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Mismatch:
    """Of the tokens that were sampled and are trained on; `positions` are theirs in the batch."""

    positions: Int64[np.ndarray, " M"]
    engine: Float32[np.ndarray, " M"]
    trainer: Float32[np.ndarray, " M"]

    @property
    def tokens(self) -> int:
        """How many were compared."""
        return len(self.positions)

    @property
    def difference(self) -> Float64[np.ndarray, " M"]:
        """Trainer less engine, nats."""
        return np.asarray(self.trainer.astype(np.float64) - self.engine)

    @property
    def mean(self) -> float:
        """Mean magnitude of the difference, nats; NaN when one is not finite or there is none."""
        return float(np.abs(self.difference).mean()) if self.tokens else float("nan")

    def metrics(self) -> Mapping[str, float]:
        """`mismatch/*`, without those that are not finite; nothing when no token was compared.

        Magnitudes of the difference: mean, 99th percentile, largest, and the share of tokens that are `APART`.
        `mismatch/ratio` is the mean ratio, `mismatch/kl_k3` the estimate of KL(engine || trainer) by r - 1 - log r.
        """
        if not self.tokens:
            return {}
        difference = self.difference
        magnitude = np.abs(difference)
        bounded = difference.clip(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
        found = {
            "mismatch/logprob_abs_mean": magnitude.mean(),
            "mismatch/logprob_abs_p99": np.percentile(magnitude, 99, method="higher"),
            "mismatch/logprob_abs_max": magnitude.max(),
            "mismatch/apart": (magnitude > APART).mean(),
            "mismatch/ratio": np.exp(bounded).mean(),
            "mismatch/kl_k3": (np.expm1(bounded) - bounded).mean(),
        }
        return {name: float(value) for name, value in found.items() if np.isfinite(value)}

    def worst(self, count: int) -> Int64[np.ndarray, " count"]:
        """Which of the M differ most, most first; fewer when there are fewer. What is not finite is the worst."""
        magnitude = np.abs(self.difference)
        ranked = np.where(np.isnan(magnitude), np.inf, magnitude)
        return np.argsort(-ranked, kind="stable")[:count].astype(np.int64)


def compare(batch: Batch, trainer: Float32[np.ndarray, " N"]) -> Mismatch:
    """The tokens of `batch` that are trained on, with the trainer's log-probs of all its tokens.

    A batch that no engine sampled, of demonstrations, has no log-probs and nothing to compare.
    """
    sampled = batch.loss_mask if batch.logprobs.any() else np.zeros_like(batch.loss_mask)
    positions = np.flatnonzero(sampled).astype(np.int64)
    return Mismatch(positions=positions, engine=batch.logprobs[positions], trainer=trainer[positions])
