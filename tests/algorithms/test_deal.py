"""tidemill.algorithms.deal"""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tidemill.algorithms.deal import deal, deal_rows, equal_parts, put_back, rows_to_train
from tidemill.contracts.batch import Batch
from tidemill.errors import TrainerError
from tidemill.testing.suites.trainer import ragged_batch

NAMES = ("token_ids", "loss_mask", "logprobs", "advantages")


def numbered(rows: int = 12, *, seed: int = 0, longest: int = 40) -> Batch:
    """Ragged rows whose tokens have different numbers each; rows 1 and 4 have none to train on, row 7 only its first.

    Row 9 is empty.
    """
    batch = ragged_batch(seed=seed, rows=rows, longest=longest)
    lengths = np.diff(batch.offsets)
    lengths[9 % rows] = 0
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    mask = batch.loss_mask[: offsets[-1]].copy()
    for row in (1, 4, 7):
        mask[offsets[row] : offsets[row + 1]] = False
    mask[offsets[7]] = True
    count = int(offsets[-1])
    return replace(
        batch,
        token_ids=np.arange(count),
        offsets=offsets,
        loss_mask=mask,
        logprobs=np.arange(count, dtype=np.float32) + 0.25,
        advantages=np.arange(count, dtype=np.float32) + 0.5,
        metrics={"a": 1.0},
    )


def rows_of(batch: Batch) -> list[tuple[int, ...]]:
    """Token numbers of each row."""
    pairs = zip(batch.offsets[:-1], batch.offsets[1:], strict=True)
    return [tuple(batch.token_ids[start:end].tolist()) for start, end in pairs]


def batches(batch: Batch, *, ranks: int, minibatches: int) -> list[list[Batch]]:
    return [[share.batch for share in own] for own in deal(batch, ranks=ranks, minibatches=minibatches)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 30])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_row_to_train_on_is_dealt_once_and_within_its_minibatch(ranks: int, count: int) -> None:
    batch = numbered()
    trained, rows = rows_to_train(batch), rows_of(batch)
    dealt = batches(batch, ranks=ranks, minibatches=count)
    assert [len(shares) for shares in dealt] == [count] * ranks
    for number, part in enumerate(np.arange(batch.rows).reshape(count, -1)):
        found = sorted(row for shares in dealt for row in rows_of(shares[number]))
        assert found == sorted(rows[row] for row in part if trained[row])


def test_rows_without_a_token_to_train_on_are_told_and_a_first_token_is_none() -> None:
    batch = numbered()
    assert np.flatnonzero(~rows_to_train(batch)).tolist() == [1, 4, 7, 9]


def test_what_belongs_to_a_token_goes_with_it_and_the_temperature_with_all() -> None:
    batch = replace(numbered(), temperature=0.7)
    for shares in batches(batch, ranks=3, minibatches=2):
        for share in shares:
            for name in NAMES:
                assert vars(share)[name].tolist() == vars(batch)[name][share.token_ids].tolist()
                assert vars(share)[name].dtype == vars(batch)[name].dtype
            assert share.temperature == 0.7
            assert share.metrics == {}


def test_one_rank_gets_the_rows_in_their_order() -> None:
    batch = numbered()
    trained = rows_to_train(batch)
    ((share,),) = batches(batch, ranks=1, minibatches=1)
    assert rows_of(share) == [row for row, wanted in zip(rows_of(batch), trained, strict=True) if wanted]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_differ_by_no_more_tokens_than_the_longest_row_has(seed: int, ranks: int) -> None:
    batch = ragged_batch(seed=seed, rows=64, longest=200)
    loads = [shares[0].tokens for shares in batches(batch, ranks=ranks, minibatches=1)]
    assert max(loads) - min(loads) <= np.diff(batch.offsets).max()
    assert max(loads) < 1.1 * sum(loads) / ranks


def test_dealing_again_gives_the_same() -> None:
    batch = replace(numbered(), offsets=np.arange(0, 49, 4), token_ids=np.arange(48) % 5)
    batch = replace(batch, **{name: np.resize(vars(batch)[name], 48) for name in NAMES})
    one, other = (batches(batch, ranks=3, minibatches=2) for _ in range(2))
    for mine, theirs in zip(one, other, strict=True):
        assert [rows_of(share) for share in mine] == [rows_of(share) for share in theirs]


@pytest.mark.parametrize("minibatches", [1, 3])
def test_numbers_of_shares_find_their_tokens_again(minibatches: int) -> None:
    batch = numbered()
    dealt = deal(batch, ranks=3, minibatches=minibatches)
    values = [np.concatenate([np.sqrt(share.batch.token_ids) for share in own]).astype(np.float32) for own in dealt]
    found = put_back(itertools.chain.from_iterable(dealt), values, tokens=batch.tokens)
    wanted = np.zeros(batch.tokens, np.float32)
    for row in np.flatnonzero(rows_to_train(batch)):
        span = slice(batch.offsets[row], batch.offsets[row + 1])
        wanted[span] = np.sqrt(batch.token_ids[span])
    assert found.tolist() == wanted.tolist()


def test_a_rank_may_get_no_rows() -> None:
    dealt = batches(numbered(), ranks=30, minibatches=1)
    empty = [shares[0] for shares in dealt if shares[0].rows == 0]
    assert len(empty) == 30 - 8
    assert (empty[0].tokens, empty[0].offsets.tolist()) == (0, [0])
    assert batches(empty[0], ranks=2, minibatches=3)[1][2].rows == 0


def test_rows_that_do_not_divide_are_refused_with_the_numbers() -> None:
    with pytest.raises(TrainerError, match="12 rows into 5 equal minibatches"):
        deal(numbered(), ranks=2, minibatches=5)
    with pytest.raises(TrainerError, match="7 rows into 2 equal minibatches"):
        equal_parts(7, 2)


def test_minibatches_are_equal_parts_in_the_given_order() -> None:
    assert [part.tolist() for part in equal_parts(6, 3)] == [[0, 1], [2, 3], [4, 5]]
    assert [part.tolist() for part in equal_parts(0, 2)] == [[], []]


@pytest.mark.parametrize("ranks", [1, 3, 30])
def test_positions_lead_what_ranks_computed_back_to_the_batch(ranks: int) -> None:
    batch = numbered()
    dealt = deal_rows(batch, ranks=ranks)
    result = np.full(batch.tokens, -1, np.int64)
    for share in dealt:
        result[share.positions] = share.batch.token_ids
    assert result.tolist() == batch.token_ids.tolist()
    assert sorted(row for share in dealt for row in rows_of(share.batch)) == sorted(rows_of(batch))
