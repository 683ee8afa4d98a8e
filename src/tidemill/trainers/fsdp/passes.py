"""Forward and backward over the micro-batches of one minibatch, added up as one big batch would give them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from tidemill.algorithms.deal import rows_to_train
from tidemill.contracts.algorithm import Loss, LossInputs
from tidemill.contracts.batch import Batch
from tidemill.trainers.common.microbatches import micro_batches
from tidemill.trainers.common.padding import PaddedRows, no_rows, pad_rows
from tidemill.trainers.fsdp.model import PolicyModel
from tidemill.trainers.fsdp.tally import Tally

__all__ = ["Passes"]


@dataclass(frozen=True, kw_only=True)
class Passes:
    """A model and how many tokens of it, padding included, are computed at a time."""

    model: PolicyModel
    device: torch.device
    tokens_per_micro_batch: int

    def plan(self, batch: Batch) -> list[PaddedRows]:
        """Micro-batches of a minibatch, of the rows that have a token to train on."""
        return self._cut(batch, np.flatnonzero(rows_to_train(batch)))

    def padded(self, parts: Sequence[PaddedRows], count: int) -> list[PaddedRows]:
        """`count` parts, of which the last may have no rows: ranks must make as many passes as any of them."""
        return [*parts, *(no_rows(self.device) for _ in range(count - len(parts)))]

    def _cut(self, batch: Batch, rows: Int64[np.ndarray, " rows"]) -> list[PaddedRows]:
        # The last token of a row is predicted but predicts nothing: it is not fed in.
        lengths = np.diff(batch.offsets) - 1
        parts = micro_batches(rows, lengths, tokens=self.tokens_per_micro_batch)
        return [pad_rows(batch, part, self.device) for part in parts]

    @torch.no_grad()
    def old_logprobs(self, rows: PaddedRows, *, temperature: float) -> Float[Tensor, " M"]:
        """Log-probs of the tokens trained on, under the present weights. Equal bits to those that a loss then sees."""
        return self.model.logprobs(rows, rows.trained, temperature=temperature)

    def accumulate(
        self,
        parts: Sequence[PaddedRows],
        old: Sequence[Float[Tensor, " M"]],
        loss: Loss,
        tally: Tally,
        *,
        temperature: float,
    ) -> tuple[float, list[Float[Tensor, " M"]]]:
        """Add the gradient of the summed numerators to the parameters; returns the summed count, and old log-probs.

        `old` is empty when the present weights are the old ones: then each forward pass yields both.
        """
        count, befores = 0.0, []
        for index, rows in enumerate(parts):
            logprobs = self.model.logprobs(rows, rows.trained, temperature=temperature)
            before = old[index] if old else logprobs.detach()
            befores.append(before)
            output = loss(_loss_inputs(rows, logprobs, before))
            count += output.count
            tally.add_loss(output, logprobs)
            tally.add_fed(places=rows.mask.numel(), tokens=len(rows.real))
            # Where there are no rows the loss may be a constant; the pass back through the model must be made all the
            # same, since other ranks take part in it.
            self.model.backward(output.numerator if len(rows.trained) else logprobs.sum())
        return count, befores

    def plan_all(self, batch: Batch) -> list[PaddedRows]:
        """Micro-batches of all rows in which a token is predicted."""
        return self._cut(batch, np.flatnonzero(np.diff(batch.offsets) > 1))

    @torch.no_grad()
    def log_probs(self, parts: Sequence[PaddedRows], batch: Batch) -> Float32[np.ndarray, " N"]:
        """Of every token of `batch` but the first of each row, in nats; 0 for these. `parts` are all of it."""
        result = np.zeros(batch.tokens, np.float32)
        for part in parts:
            logprobs = self.model.logprobs(part, part.real, temperature=batch.temperature)
            result[part.positions] = logprobs.cpu().numpy()
        return result


def _loss_inputs(rows: PaddedRows, logprobs: Float[Tensor, " M"], old: Float[Tensor, " M"]) -> LossInputs:
    def spread(values: Tensor) -> Tensor:
        flat = torch.zeros(rows.mask.numel(), dtype=torch.float32, device=values.device)
        return flat.scatter(0, rows.trained, values).view(rows.mask.shape)

    return LossInputs(
        logprobs=spread(logprobs),
        old_logprobs=spread(old),
        rollout_logprobs=rows.rollout_logprobs,
        advantages=rows.advantages,
        mask=rows.mask,
    )
