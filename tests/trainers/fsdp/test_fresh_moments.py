"""tidemill.trainers.fsdp.fresh_moments: zeros where a checkpoint has no moments, and never some of either."""

from dataclasses import replace

import numpy as np
import pytest
from tests.trainers.fsdp.conftest import MakeFsdpTrainer
from tests.trainers.fsdp.test_pieces import WHOLE, entry

from tidemill.algorithms.losses.clip import ClipLoss
from tidemill.contracts.events import Event, Notice
from tidemill.errors import CheckpointError
from tidemill.residency.ledger import Ledger
from tidemill.testing.suites.trainer_case import awake, copied, ragged_batch, same
from tidemill.trainers.fsdp.fresh_moments import with_fresh_moments
from tidemill.trainers.fsdp.pieces import boxes

CLIP = ClipLoss(low=0.2, high=0.2)


@pytest.mark.parametrize(("start", "rows"), [(0, 2), (4, 1), (5, 0)])
def test_a_rank_gets_zeros_for_its_own_rows(start: int, rows: int) -> None:
    mine = replace(entry(rows=rows, start=start), name="optimizer/exp_avg/words")
    fresh = with_fresh_moments({"words": WHOLE, "optimizer/other": WHOLE}, [mine], [mine.name])
    assert set(fresh) == {"words", mine.name} and fresh[mine.name].shape == (5, 4)
    box = boxes(Ledger((mine,)), fresh)[mine.name]
    assert (box.dtype, box.shape) == ("F32", (rows, 4)) and bytes(box.data) == bytes(rows * 16)


@pytest.mark.parametrize("missing", ["all", "one"])
def test_a_trainer_without_its_moments_goes_on_as_one_whose_moments_are_zero_and_says_so(
    make_fsdp_trainer: MakeFsdpTrainer, missing: str
) -> None:
    events: list[Event] = []
    trainer, twin = make_fsdp_trainer(emit=events.append), make_fsdp_trainer()
    with awake(twin):
        twin.begin("rl")
        twin.step(ragged_batch(), CLIP)
        saved = copied(twin.snapshot())
        moments = [name for name in saved.tensors if name.startswith("optimizer/")]
        gone = moments if missing == "all" else moments[:1]
        rest = {name: tensor for name, tensor in saved.tensors.items() if name not in gone}
        zeros = {
            name: replace(saved.tensors[name], data=memoryview(np.zeros(tensor.nbytes, np.uint8)))
            for name, tensor in twin.snapshot().tensors.items()
            if name in moments
        }
        twin.load(replace(saved, tensors=saved.tensors | zeros, extra=saved.extra | {"optimizer_steps": 0}))
        twin.step(ragged_batch(seed=1), CLIP)
        right = copied(twin.snapshot())
    with awake(trainer):
        for accept in ((), ("data",)):
            with pytest.raises(CheckpointError, match=r'accept a fresh optimizer with checkpoint.accept = \["opti'):
                trainer.load(replace(saved, tensors=rest, accept=accept))
        trainer.load(replace(saved, tensors=rest, accept=("optimizer",)))
        trainer.step(ragged_batch(seed=1), CLIP)
        assert same(copied(trainer.snapshot()), right)
    (told,) = [event.text for event in events if isinstance(event, Notice) and event.level == "warning"]
    assert f"{len(gone)} tensors of the optimizer are not in the checkpoint" in told and "begin at zero" in told
