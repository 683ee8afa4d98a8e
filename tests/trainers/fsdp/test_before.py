"""tidemill.trainers.fsdp.before"""

import numpy as np
import torch

from tidemill.testing.suites.trainer import ragged_batch
from tidemill.trainers.common.padding import no_rows, pad_rows
from tidemill.trainers.fsdp.before import BeforeUpdate

CPU = torch.device("cpu")


def test_log_probs_of_micro_batches_in_any_order_find_their_tokens() -> None:
    batches = [ragged_batch(seed=seed, rows=5) for seed in (1, 2)]
    collected = BeforeUpdate()
    for batch in batches:
        parts = [pad_rows(batch, np.array(rows), CPU) for rows in ([3, 0], [4], [1, 2])] + [no_rows(CPU)]
        # A number that says which token it is of.
        values = [torch.from_numpy(-1.0 - part.trained_positions).float() for part in parts]
        collected.add(parts, values, tokens=batch.tokens)
    wanted = [np.where(batch.loss_mask, -1.0 - np.arange(batch.tokens), 0) for batch in batches]
    found = collected.taken()
    assert found.dtype == np.float32
    assert found.tolist() == np.concatenate(wanted).tolist()


def test_a_rank_that_got_nothing_has_nothing_to_tell() -> None:
    assert BeforeUpdate().taken().tolist() == []
    collected = BeforeUpdate()
    collected.add([no_rows(CPU)], [torch.zeros(0)], tokens=3)
    assert collected.taken().tolist() == [0.0, 0.0, 0.0]
