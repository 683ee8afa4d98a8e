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
from tidemill.trainers.common.padding import PaddedRows, pad_rows
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
        self, parts: Sequence[PaddedRows], old: Sequence[Float[Tensor, " M"]], batch: Batch, loss: Loss, tally: Tally
    ) -> float:
        """Add the gradient of the summed numerators to the parameters; returns the summed count.

        `old` is empty when the present weights are the old ones: then each forward pass yields both.
        """
        sampled = bool(batch.logprobs.any())
        count = 0.0
        for index, rows in enumerate(parts):
            logprobs = self.model.logprobs(rows, rows.trained, temperature=batch.temperature)
            before = old[index] if old else logprobs.detach()
            output = loss(_loss_inputs(rows, logprobs, before))
            count += output.count
            tally.add_loss(output, logprobs)
            if sampled:
                tally.add_mismatch(before, rows.rollout_logprobs.flatten().index_select(0, rows.trained))
            output.numerator.backward()  # type: ignore[no-untyped-call]
        return count

    @torch.no_grad()
    def log_probs(self, batch: Batch) -> Float32[np.ndarray, " N"]:
        """Of every token but the first of each row, in nats; 0 for these."""
        result = np.zeros(batch.tokens, np.float32)
        rows = np.flatnonzero(np.diff(batch.offsets) > 1)
        for part in self._cut(batch, rows):
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
