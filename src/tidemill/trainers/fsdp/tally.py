"""Numbers of one step, summed on the device and over ranks, and read once at its end."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from tidemill.algorithms.losses.clip import LOG_RATIO_LIMIT, k3
from tidemill.algorithms.reduce import divide
from tidemill.contracts.algorithm import LossOutput

__all__ = ["Gather", "Tally"]

Gather = Callable[[Float64[Tensor, " K"]], Float64[Tensor, "W K"]]
"""Numbers of each rank, by rank."""
_LOSS = "policy/loss"
_MISMATCH = ("mismatch/logprob_abs_mean", "mismatch/kl_k3")


class Tally:
    """Adds up losses, their sums and the tokens trained on. Old and rollout log-probs are kept to compare them."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._numerators: list[Tensor] = []
        self._count = 0.0
        self._tokens = 0
        self._fed = 0
        self._real = 0
        self._old: list[Tensor] = []
        self._rollout: list[Tensor] = []

    def add_loss(self, output: LossOutput, logprobs: Float[Tensor, " M"]) -> None:
        """Take the loss of a micro-batch, and the log-probs of the tokens that it was computed from."""
        self._numerators.append(output.numerator.detach())
        self._count += output.count
        self._tokens += len(logprobs)
        for name, value in {**output.sums, "policy/nll": -logprobs.detach().sum()}.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    def add_fed(self, *, places: int, tokens: int) -> None:
        """Count what was fed into the model: `tokens` of rows, and the rest of the `places` padding."""
        self._fed += places
        self._real += tokens

    def add_mismatch(self, old: Float[Tensor, " M"], rollout: Float[Tensor, " M"]) -> None:
        """Take the trainer's and the engine's log-probs of the same tokens, under what should be the same weights."""
        self._old.append(old)
        self._rollout.append(rollout)

    def metrics(self, gather: Gather) -> dict[str, float]:
        """Means over all ranks by name; empty when nothing was trained on. A collective that reads the device once.

        Every rank must have added as many losses as the others, of the same names, and a mismatch to each or to none.
        """
        if not self._numerators:
            return {}
        sums, largest = self._mismatch()
        sums = {**self._sums, _LOSS: torch.stack(self._numerators).sum(), **sums}
        compared = sum(len(old) for old in self._old)
        counts = [self._tokens, self._count, compared, self._fed, self._real]
        numbers = [value.detach().double() for value in (*sums.values(), largest)]
        numbers.append(torch.tensor(counts, dtype=torch.float64, device=largest.device))
        rows = gather(torch.cat([number.reshape(-1) for number in numbers])).cpu()
        return self._means(list(sums), rows)

    def _means(self, names: list[str], rows: Float64[Tensor, "W K"]) -> dict[str, float]:
        tokens, count, compared, fed, real = rows[:, -5:].sum(0).tolist()
        # Means are float32 numbers, as sums are: on one rank nothing is added here, and the bits stay.
        totals = rows[:, : len(names)].sum(0).float()
        divisors = dict.fromkeys(names, tokens) | {_LOSS: count} | dict.fromkeys(_MISMATCH, compared)
        found = {name: float(divide(total, divisors[name])) for name, total in zip(names, totals, strict=True)}
        if compared:
            found["mismatch/logprob_abs_max"] = float(rows[:, len(names)].max())
        if fed:
            found |= {"train/tokens": real, "train/padding_fraction": 1.0 - real / fed}
        return found

    def _mismatch(self) -> tuple[dict[str, Tensor], Tensor]:
        """Sums by the name of their mean, and the largest difference; nothing and 0 where nothing was sampled."""
        if not self._old:
            return {}, torch.zeros((), device=self._numerators[0].device)
        difference = torch.cat(self._old) - torch.cat(self._rollout)
        magnitude = difference.abs()
        estimate = k3(difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
        largest = magnitude.max() if len(magnitude) else magnitude.sum()
        return dict(zip(_MISMATCH, (magnitude.sum(), estimate.sum()), strict=True)), largest
