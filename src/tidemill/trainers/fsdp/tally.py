"""Numbers of one step, summed on the device and over ranks, and read once at its end."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from tidemill.algorithms.reduce import divide
from tidemill.contracts.algorithm import LossOutput

__all__ = ["Gather", "Tally"]

Gather = Callable[[Float64[Tensor, " K"]], Float64[Tensor, "W K"]]
"""Numbers of each rank, by rank."""
_LOSS = "policy/loss"


class Tally:
    """Adds up losses, their sums and the tokens trained on."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._numerators: list[Tensor] = []
        self._count = 0.0
        self._tokens = 0
        self._fed = 0
        self._real = 0

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

    def metrics(self, gather: Gather) -> dict[str, float]:
        """Means over all ranks by name; empty when nothing was trained on. A collective that reads the device once.

        Every rank must have added as many losses as the others, of the same names.
        """
        if not self._numerators:
            return {}
        loss = torch.stack(self._numerators).sum()
        sums = {**self._sums, _LOSS: loss}
        numbers = [value.detach().double() for value in sums.values()]
        counts = [self._tokens, self._count, self._fed, self._real]
        numbers.append(torch.tensor(counts, dtype=torch.float64, device=loss.device))
        rows = gather(torch.cat([number.reshape(-1) for number in numbers])).cpu()
        return self._means(list(sums), rows)

    def _means(self, names: list[str], rows: Float64[Tensor, "W K"]) -> dict[str, float]:
        tokens, count, fed, real = rows[:, -4:].sum(0).tolist()
        # Means are float32 numbers, as sums are: on one rank nothing is added here, and the bits stay.
        totals = rows[:, : len(names)].sum(0).float()
        divisors = dict.fromkeys(names, tokens) | {_LOSS: count}
        found = {name: float(divide(total, divisors[name])) for name, total in zip(names, totals, strict=True)}
        if fed:
            found |= {"train/tokens": real, "train/padding_fraction": 1.0 - real / fed}
        return found
