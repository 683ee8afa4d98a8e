"""Which rows of a minibatch are computed together.

Pure and deterministic. Micro-batches change speed and memory, never the result: `algorithms.reduce` sees to that.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

__all__ = ["micro_batches"]

Rows = Int64[np.ndarray, " rows"]


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
