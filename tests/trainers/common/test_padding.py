"""tidemill.trainers.common.padding"""

import numpy as np
import torch

from tidemill.contracts.batch import Batch
from tidemill.trainers.common.padding import pad_rows

BATCH = Batch(
    token_ids=np.array([1, 2, 3, 4, 5, 6, 7, 8, 9]),
    offsets=np.array([0, 4, 4, 6, 9]),
    loss_mask=np.array([False, False, True, True, False, True, False, True, False]),
    logprobs=np.array([0, 0, -3, -4, 0, -6, 9, -8, 9], np.float32),
    advantages=np.array([0, 0, 0.3, 0.4, 0, 0.6, 9, 0.8, 9], np.float32),
    metrics={},
)


def test_inputs_stand_one_before_their_targets_and_padding_is_on_the_right() -> None:
    rows = pad_rows(BATCH, np.array([2, 0]), torch.device("cpu"))
    assert rows.input_ids.tolist() == [[5, 0, 0], [1, 2, 3]]
    assert rows.target_ids.tolist() == [[6, 0, 0], [2, 3, 4]]
    assert rows.mask.tolist() == [[True, False, False], [False, True, True]]


def test_what_is_not_masked_in_is_zero() -> None:
    rows = pad_rows(BATCH, np.array([3, 0]), torch.device("cpu"))
    assert rows.rollout_logprobs.tolist() == [[-8, 0, 0], [0, -3, -4]]
    torch.testing.assert_close(rows.advantages, torch.tensor([[0.8, 0, 0], [0, 0.3, 0.4]]))


def test_places_of_targets_lead_back_to_the_batch() -> None:
    rows = pad_rows(BATCH, np.array([2, 0]), torch.device("cpu"))
    assert rows.real.tolist() == [0, 3, 4, 5]
    assert rows.positions.tolist() == [5, 1, 2, 3]
    assert rows.trained.tolist() == [0, 4, 5]
    assert rows.target_ids.flatten()[rows.real].tolist() == BATCH.token_ids[rows.positions].tolist()


def test_masks_come_from_lengths_and_not_from_token_values() -> None:
    zeros = Batch(**{**vars(BATCH), "token_ids": np.zeros(9, np.int64)})
    assert pad_rows(zeros, np.array([0, 2]), torch.device("cpu")).real.tolist() == [0, 1, 2, 3]
