"""tidemill.algorithms.token_ids"""

from dataclasses import replace

import numpy as np
import pytest

from tidemill.algorithms.token_ids import check_token_ids
from tidemill.errors import TrainerError
from tidemill.testing.suites.trainer import ragged_batch


def test_ids_that_the_model_has_a_word_for_pass_and_no_ids_at_all_do() -> None:
    batch = ragged_batch(seed=0, rows=3, longest=5)
    check_token_ids(batch, vocabulary=int(batch.token_ids.max()) + 1)
    nothing = np.zeros(0, np.int64)
    check_token_ids(replace(batch, token_ids=nothing, offsets=np.zeros(1, np.int64)), vocabulary=1)


@pytest.mark.parametrize("wrong", [-1, 7])
def test_one_id_outside_the_vocabulary_refuses_the_batch(wrong: int) -> None:
    batch = ragged_batch(seed=0, rows=3, longest=5)
    ids = np.full_like(batch.token_ids, 6)
    ids[2] = wrong
    with pytest.raises(TrainerError, match=f"token ids from {min(wrong, 6)} to {max(wrong, 6)}: the model has 7 words"):
        check_token_ids(replace(batch, token_ids=ids), vocabulary=7)
