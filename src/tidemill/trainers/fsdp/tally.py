"""Numbers of one step, summed on the device and read once at its end."""

import torch
from jaxtyping import Float
from torch import Tensor

from tidemill.algorithms.losses.clip import LOG_RATIO_LIMIT, k3
from tidemill.algorithms.reduce import divide
from tidemill.contracts.algorithm import LossOutput

__all__ = ["Tally"]


class Tally:
    """Adds up losses, their sums and the tokens trained on. Old and rollout log-probs are kept to compare them."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._numerators: list[Tensor] = []
        self._count = 0.0
        self._tokens = 0
        self._old: list[Tensor] = []
        self._rollout: list[Tensor] = []

    def add_loss(self, output: LossOutput, logprobs: Float[Tensor, " M"]) -> None:
        """Take the loss of a micro-batch, and the log-probs of the tokens that it was computed from."""
        self._numerators.append(output.numerator.detach())
        self._count += output.count
        self._tokens += len(logprobs)
        for name, value in {**output.sums, "policy/nll": -logprobs.detach().sum()}.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def add_mismatch(self, old: Float[Tensor, " M"], rollout: Float[Tensor, " M"]) -> None:
        """Take the trainer's and the engine's log-probs of the same tokens, under what should be the same weights."""
        self._old.append(old)
        self._rollout.append(rollout)

    def metrics(self) -> dict[str, float]:
        """Means by name; empty when nothing was trained on. Reads the device once."""
        if not self._numerators:
            return {}
        values = {name: divide(value, self._tokens) for name, value in self._sums.items()}
        values["policy/loss"] = divide(torch.stack(self._numerators).sum(), self._count)
        values |= self._mismatch()
        read = torch.stack([value.double() for value in values.values()]).tolist()
        return dict(zip(values, read, strict=True))

    def _mismatch(self) -> dict[str, Tensor]:
        if not self._old:
            return {}
        difference = torch.cat(self._old) - torch.cat(self._rollout)
        magnitude = difference.abs()
        estimate = k3(difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
        return {
            "mismatch/logprob_abs_mean": divide(magnitude.sum(), len(difference)),
            "mismatch/logprob_abs_max": magnitude.max(),
            "mismatch/kl_k3": divide(estimate.sum(), len(difference)),
        }
