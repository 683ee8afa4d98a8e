"""Trajectories laid end to end as a `Batch`: every row is kept, so that row counts stay those of the settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tidemill.contracts.batch import Batch

__all__ = ["Row", "pack"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A prompt and its answer. `logprobs` and `mask` have the answer's length; all of it has one `advantage`."""

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]
    logprobs: Sequence[float]
    mask: Sequence[bool]
    advantage: float = 0.0


def pack(rows: Sequence[Row], *, temperature: float, metrics: Mapping[str, float]) -> Batch:
    """Rows in order. Where the mask is False, log-prob and advantage are 0; a row's first token is never masked in."""
    lengths = [len(row.prompt_ids) + len(row.answer_ids) for row in rows]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    token_ids = np.zeros(offsets[-1], np.int64)
    mask = np.zeros(offsets[-1], np.bool_)
    logprobs = np.zeros(offsets[-1], np.float32)
    advantages = np.zeros(offsets[-1], np.float32)
    for row, start, end in zip(rows, offsets[:-1], offsets[1:], strict=True):
        answer = slice(start + len(row.prompt_ids), end)
        token_ids[start : answer.start] = row.prompt_ids
        token_ids[answer] = row.answer_ids
        mask[answer] = row.mask
        logprobs[answer] = row.logprobs
        advantages[answer] = row.advantage
        mask[start : start + 1] = False
    return Batch(
        token_ids=token_ids,
        offsets=offsets,
        loss_mask=mask,
        logprobs=np.where(mask, logprobs, np.float32(0)),
        advantages=np.where(mask, advantages, np.float32(0)),
        temperature=temperature,
        metrics=metrics,
    )
