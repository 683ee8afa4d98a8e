"""tidemill.algorithms.pack"""

import numpy as np

from tidemill.algorithms.pack import Row, pack


def test_rows_lie_end_to_end_with_everything_aligned_to_its_token() -> None:
    rows = [
        Row(prompt_ids=[7, 8], answer_ids=[9], logprobs=[-0.5], mask=[True], advantage=2.0),
        Row(prompt_ids=[1], answer_ids=[2, 3, 4], logprobs=[-1.0, 0.0, -3.0], mask=[True, False, True], advantage=-1.0),
    ]
    batch = pack(rows, temperature=0.7, metrics={"a": 1.0})
    assert batch.token_ids.tolist() == [7, 8, 9, 1, 2, 3, 4]
    assert batch.offsets.tolist() == [0, 3, 7]
    assert batch.loss_mask.tolist() == [False, False, True, False, True, False, True]
    assert batch.logprobs.tolist() == [0, 0, -0.5, 0, -1.0, 0, -3.0]
    assert batch.advantages.tolist() == [0, 0, 2.0, 0, -1.0, 0, -1.0]
    assert (batch.temperature, batch.metrics) == (0.7, {"a": 1.0})
    assert [a.dtype for a in (batch.token_ids, batch.offsets, batch.loss_mask, batch.logprobs, batch.advantages)] == [
        np.int64,
        np.int64,
        np.bool_,
        np.float32,
        np.float32,
    ]


def test_a_first_token_is_never_trained_on_even_without_a_prompt() -> None:
    batch = pack(
        [Row(prompt_ids=[], answer_ids=[5, 6], logprobs=[-1.0, -1.0], mask=[True, True], advantage=1.0)],
        temperature=1.0,
        metrics={},
    )
    assert batch.loss_mask.tolist() == [False, True]
    assert batch.logprobs.tolist() == [0.0, -1.0]


def test_empty_answers_and_empty_rows_stay_rows() -> None:
    row = Row(prompt_ids=[5], answer_ids=[], logprobs=[], mask=[])
    empty = Row(prompt_ids=[], answer_ids=[], logprobs=[], mask=[])
    full = Row(prompt_ids=[5], answer_ids=[6], logprobs=[-1.0], mask=[True])
    batch = pack([row, empty, full, empty], temperature=1.0, metrics={})
    assert batch.offsets.tolist() == [0, 1, 1, 3, 3]
    assert batch.loss_mask.tolist() == [False, False, True]


def test_garbage_where_nothing_is_trained_on_does_not_reach_the_batch() -> None:
    row = Row(prompt_ids=[1], answer_ids=[2], logprobs=[float("nan")], mask=[False], advantage=float("inf"))
    batch = pack([row], temperature=1.0, metrics={})
    assert batch.logprobs.tolist() == batch.advantages.tolist() == [0.0, 0.0]


def test_nothing_packs_to_nothing() -> None:
    batch = pack([], temperature=1.0, metrics={})
    assert (batch.rows, batch.tokens) == (0, 0)
