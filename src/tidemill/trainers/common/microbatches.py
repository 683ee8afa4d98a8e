"""Which rows are computed together: minibatches (one optimizer step each) and, within them, micro-batches.

Pure and deterministic. Micro-batches change speed and memory, never the result: `algorithms.reduce` sees to that.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from tidemill.errors import TrainerError

__all__ = ["micro_batches", "minibatches"]

Rows = Int64[np.ndarray, " rows"]


def minibatches(rows: int, count: int) -> list[Rows]:
    """Row numbers in the given order, split into `count` equal parts. Raises TrainerError when they do not divide."""
    if rows % count:
        raise TrainerError(
            f"cannot split a batch of {rows} rows into {count} equal minibatches; choose trainer.minibatches so that "
            "it divides rollout.prompts times rollout.samples, and warm_up.batch"
        )
    return list(np.arange(rows, dtype=np.int64).reshape(count, -1))


def micro_batches(rows: Rows, lengths: Sequence[int] | Int64[np.ndarray, " S"], *, tokens: int) -> list[Rows]:
    """`rows` sorted by length, cut so that rows times longest row is at most `tokens`; a longer row goes alone.

    `lengths[row]` is the length of a row. Shortest first; equal lengths keep the order of `rows`.
    """
    lengths = np.asarray(lengths)
    ordered = rows[np.argsort(lengths[rows], kind="stable")]
    cuts, start = [], 0
    for position, row in enumerate(ordered):
        if position > start and (position - start + 1) * lengths[row] > tokens:
            cuts.append(position)
            start = position
    return [part for part in np.split(ordered, cuts) if len(part)]
