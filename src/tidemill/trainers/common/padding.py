"""Rows of a batch as rectangles of tokens, padded to the right.

With causal attention what stands to the right of a token cannot change it: no attention mask is needed. Masks come from
lengths and from the batch, never from token values. `B` rows of `T` predictions.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from tidemill.contracts.batch import Batch

__all__ = ["PaddedRows", "no_rows", "pad_rows"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PaddedRows:
    """`target_ids[b, t]` follows `input_ids[b, t]`; `mask` is True where the target is trained on.

    What is not masked in is 0 in `rollout_logprobs` and `advantages`. `trained` and `real` list the places, in the
    flattened rectangle, of targets that are masked in, and of all that belong to a row; `trained_positions` and
    `positions` are their places in the batch.
    """

    input_ids: Int64[Tensor, "B T"]
    target_ids: Int64[Tensor, "B T"]
    mask: Bool[Tensor, "B T"]
    rollout_logprobs: Float[Tensor, "B T"]
    advantages: Float[Tensor, "B T"]
    trained: Int64[Tensor, " M"]
    real: Int64[Tensor, " R"]
    trained_positions: Int64[np.ndarray, " M"]
    positions: Int64[np.ndarray, " R"]


def pad_rows(batch: Batch, rows: Int64[np.ndarray, " B"], device: torch.device) -> PaddedRows:
    """The given rows, each of at least two tokens, as wide as the longest of them."""
    starts = batch.offsets[rows][:, None]
    predictions = batch.offsets[rows + 1][:, None] - starts - 1
    columns = np.arange(predictions.max())[None, :]
    real = columns < predictions
    inputs = np.where(real, starts + columns, 0)
    targets = np.where(real, inputs + 1, 0)
    mask = real & batch.loss_mask[targets]

    def move(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return PaddedRows(
        input_ids=move(np.where(real, batch.token_ids[inputs], 0)),
        target_ids=move(np.where(real, batch.token_ids[targets], 0)),
        mask=move(mask),
        rollout_logprobs=move(np.where(mask, batch.logprobs[targets], np.float32(0))),
        advantages=move(np.where(mask, batch.advantages[targets], np.float32(0))),
        trained=move(np.flatnonzero(mask)),
        real=move(np.flatnonzero(real)),
        trained_positions=targets[mask],
        positions=targets[real],
    )


def no_rows(device: torch.device) -> PaddedRows:
    """One token of padding and nothing else: what a rank computes with when others still have rows and it has not."""
    inputs = torch.zeros((1, 1), dtype=torch.int64, device=device)
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    return PaddedRows(
        input_ids=inputs,
        target_ids=inputs,
        mask=torch.zeros((1, 1), dtype=torch.bool, device=device),
        rollout_logprobs=torch.zeros((1, 1), device=device),
        advantages=torch.zeros((1, 1), device=device),
        trained=nothing,
        real=nothing,
        trained_positions=np.zeros(0, np.int64),
        positions=np.zeros(0, np.int64),
    )
