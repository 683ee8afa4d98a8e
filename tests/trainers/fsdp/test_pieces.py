"""tidemill.trainers.fsdp.pieces and tidemill.trainers.fsdp.ranks, as far as one process shows."""

import numpy as np
import pytest
import torch

from tidemill.contracts.checkpoint import TensorBytes
from tidemill.contracts.footprint import Part
from tidemill.errors import CheckpointError
from tidemill.residency.ledger import Entry, Ledger
from tidemill.trainers.fsdp.pieces import boxes, local, whole_and_offset
from tidemill.trainers.fsdp.ranks import Alone

NUMBERS = np.arange(20, dtype=np.float32).reshape(5, 4)
WHOLE = TensorBytes(dtype="F32", shape=(5, 4), data=memoryview(NUMBERS.tobytes()))


def entry(*, rows: int, start: int, whole: tuple[int, ...] | None = (5, 4)) -> Entry:
    return Entry(
        name="words",
        part=Part.WEIGHTS,
        dtype=torch.float32,
        shape=(rows, 4),
        stride=(4, 1),
        slab=0,
        offset=0,
        whole=whole,
        offset_in_whole=None if whole is None else (start, 0),
    )


@pytest.mark.parametrize(("start", "rows"), [(0, 2), (2, 2), (4, 1), (5, 0)])
def test_a_rank_sees_of_a_saved_tensor_what_it_holds(start: int, rows: int) -> None:
    box = boxes(Ledger((entry(rows=rows, start=start),)), {"words": WHOLE})["words"]
    assert (box.dtype, box.shape) == ("F32", (rows, 4))
    assert bytes(box.data) == NUMBERS[start : start + rows].tobytes()
    if rows == 2:
        assert bytes(box.read((1, 1), (1, 2))) == NUMBERS[start + 1 : start + 2, 1:3].tobytes()


def test_what_a_rank_holds_whole_and_what_it_does_not_know_is_left_as_it_is() -> None:
    found = boxes(Ledger((entry(rows=5, start=0, whole=None),)), {"words": WHOLE, "strange": WHOLE})
    assert found == {"words": WHOLE, "strange": WHOLE}
    assert boxes(Ledger((entry(rows=2, start=0),)), {}) == {}


def test_a_tensor_saved_of_another_shape_is_refused_with_both() -> None:
    with pytest.raises(CheckpointError, match=r"saved as F32 \[5, 4\], here it is F32 \[6, 4\]"):
        boxes(Ledger((entry(rows=2, start=0, whole=(6, 4)),)), {"words": WHOLE})


def test_a_plain_tensor_is_whole() -> None:
    tensor = torch.zeros(3, 2)
    assert local(tensor) is tensor
    assert whole_and_offset(tensor) == ((3, 2), (0, 0))


def test_one_rank_gathers_its_own_numbers_and_has_no_groups() -> None:
    ranks = Alone()
    assert ranks.gather(torch.tensor([1.0, 2.0], dtype=torch.float64)).tolist() == [[1.0, 2.0]]
    for move in (ranks.park, ranks.revive, ranks.close):
        move()
    assert not torch.distributed.is_initialized()
