"""Which rows are computed where: an update's rows in minibatches, and each minibatch's rows over the ranks.

Pure and deterministic, by numpy alone: the driver deals, ranks compute. Where a row is computed changes no sum, since
numerators and counts are added over ranks and divided once. Letters: `N` tokens of the whole batch, `n` of a share.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float32, Int64

from tidemill.contracts.batch import Batch
from tidemill.errors import TrainerError

__all__ = ["Dealt", "deal", "deal_rows", "equal_parts", "put_back", "rows_to_train", "share_of"]

Rows = Int64[np.ndarray, " rows"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Dealt:
    """One rank's share of a batch, and the place in the whole batch of each of its tokens."""

    batch: Batch
    positions: Int64[np.ndarray, " n"]


def deal(batch: Batch, *, ranks: int, minibatches: int) -> list[list[Dealt]]:
    """Shares by rank, then by minibatch, of the rows that have a token to train on; a share may have no rows.

    Minibatches are contiguous equal parts of all rows. Within one, rows go to ranks so that tokens are balanced; each
    rank keeps the order of the batch. Raises TrainerError when rows do not divide into minibatches.
    """
    trained = rows_to_train(batch)
    shares = [_balanced(batch, rows[trained[rows]], ranks) for rows in equal_parts(batch.rows, minibatches)]
    return [[share_of(batch, by_rank[rank]) for by_rank in shares] for rank in range(ranks)]


def deal_rows(batch: Batch, *, ranks: int) -> list[Dealt]:
    """Every row to one rank, so that tokens are balanced: for what is computed of each token by itself."""
    return [share_of(batch, rows) for rows in _balanced(batch, np.arange(batch.rows, dtype=np.int64), ranks)]


def put_back(
    shares: Iterable[Dealt], values: Sequence[Float32[np.ndarray, " n"]], *, tokens: int
) -> Float32[np.ndarray, " N"]:
    """One number a token of the whole batch of `tokens`, from those of its shares in order; 0 where none has any.

    Arrays may hold several shares laid end to end.
    """
    found = np.zeros(tokens, np.float32)
    found[np.concatenate([share.positions for share in shares])] = np.concatenate(values)
    return found


def equal_parts(rows: int, count: int) -> list[Rows]:
    """Row numbers in the given order, split into `count` equal parts. Raises TrainerError when they do not divide."""
    if rows % count:
        raise TrainerError(
            f"cannot split a batch of {rows} rows into {count} equal minibatches; choose trainer.minibatches so that "
            "it divides rollout.prompts times rollout.samples, and warm_up.batch"
        )
    return list(np.arange(rows, dtype=np.int64).reshape(count, -1))


def rows_to_train(batch: Batch) -> Bool[np.ndarray, " S"]:
    """Whether a row has a token to train on besides its first, which nothing predicts."""
    mask = batch.loss_mask.copy()
    mask[batch.offsets[:-1][np.diff(batch.offsets) > 0]] = False
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(mask)])
    return np.asarray(np.diff(before[batch.offsets]) > 0)


def _balanced(batch: Batch, rows: Rows, ranks: int) -> list[Rows]:
    """Longest first to the rank with the fewest tokens, the lowest of several."""
    lengths = np.diff(batch.offsets)
    loads = [(0, rank) for rank in range(ranks)]
    given: list[list[int]] = [[] for _ in range(ranks)]
    for row in rows[np.argsort(-lengths[rows], kind="stable")]:
        load, rank = loads[0]
        given[rank].append(int(row))
        heapq.heapreplace(loads, (load + int(lengths[row]), rank))
    return [np.array(sorted(own), np.int64) for own in given]


def share_of(batch: Batch, rows: Rows) -> Dealt:
    """These rows, in this order; metrics stay behind."""
    starts, lengths = batch.offsets[rows], np.diff(batch.offsets)[rows]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    positions = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    share = replace(
        batch,
        token_ids=batch.token_ids[positions],
        offsets=offsets,
        loss_mask=batch.loss_mask[positions],
        logprobs=batch.logprobs[positions],
        advantages=batch.advantages[positions],
        metrics={},
    )
    return Dealt(batch=share, positions=positions)
