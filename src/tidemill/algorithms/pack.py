"""Trajectories laid end to end as a `Batch`: every row is kept, so that row counts stay those of the settings."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import NamedTuple, TypeVar

import numpy as np

from tidemill.contracts.batch import Batch

__all__ = ["Row", "pack"]

Value = TypeVar("Value")


class Row(NamedTuple):
    """A prompt and its answer. `logprobs` and `mask` have the answer's length; all of it has one `advantage`."""

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]
    logprobs: Sequence[float]
    mask: Sequence[bool]
    advantage: float = 0.0


def pack(rows: Sequence[Row], *, temperature: float, metrics: Mapping[str, float]) -> Batch:
    """Rows in order. Where the mask is False, log-prob and advantage are 0; a row's first token is never masked in."""
    lengths = np.array([len(row.prompt_ids) + len(row.answer_ids) for row in rows], np.int64)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    count = int(offsets[-1])
    token_ids = np.fromiter(chain.from_iterable(chain(row.prompt_ids, row.answer_ids) for row in rows), np.int64, count)
    mask = np.fromiter(chain.from_iterable(_padded(row, row.mask, False) for row in rows), np.bool_, count)
    logprobs = np.fromiter(chain.from_iterable(_padded(row, row.logprobs, 0.0) for row in rows), np.float32, count)
    advantages = np.repeat(np.array([row.advantage for row in rows], np.float32), lengths)
    mask[offsets[:-1][lengths > 0]] = False
    return Batch(
        token_ids=token_ids,
        offsets=offsets,
        loss_mask=mask,
        logprobs=np.where(mask, logprobs, np.float32(0)),
        advantages=np.where(mask, advantages, np.float32(0)),
        temperature=temperature,
        metrics=metrics,
    )


def _padded(row: Row, values: Iterable[Value], filler: Value) -> Iterable[Value]:
    return chain(repeat(filler, len(row.prompt_ids)), values)
