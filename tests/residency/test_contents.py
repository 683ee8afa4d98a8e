"""Single tensors in pages (`tidemill.residency.contents`)."""

import math

import numpy as np
import pytest
import torch

from tidemill.contracts.checkpoint import TensorBytes
from tidemill.contracts.footprint import Part
from tidemill.errors import CheckpointError
from tidemill.residency.arena import Arena, map_plain
from tidemill.residency.contents import check_loadable, checksum_of, put_bytes, tensor_bytes
from tidemill.residency.ledger import NO_SLAB, Entry, Ledger


def entry(stride: tuple[int, ...] = (3, 1), slab: int = 0, shape: tuple[int, ...] = (2, 3)) -> Entry:
    return Entry(name="w", part=Part.WEIGHTS, dtype=torch.float32, shape=shape, stride=stride, slab=slab, offset=64)


def saved(array: np.ndarray, dtype: str = "F32") -> TensorBytes:
    return TensorBytes(dtype=dtype, shape=array.shape, data=memoryview(array.tobytes()))


@pytest.mark.parametrize("stride", [(3, 1), (1, 2), (8, 2)])
def test_what_is_put_in_comes_out_row_major_whatever_the_strides(stride: tuple[int, ...]) -> None:
    page = Arena(sizes=[256], map_memory=map_plain, idle_spare_bytes=0).page(0)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    put_bytes(entry(stride), page, saved(array))
    out = tensor_bytes(entry(stride), [page])
    assert bytes(out.data) == array.tobytes()
    assert out.data.readonly
    assert (out.dtype, out.shape) == ("F32", (2, 3))
    assert checksum_of(entry(stride), page.memory) == checksum_of(entry(), contiguous_page(array))


class Counted:
    """A SavedTensor that notes which rows are read of it, and will not be read as a whole."""

    dtype = "F32"

    def __init__(self, array: np.ndarray) -> None:
        self.shape = array.shape
        self.held = saved(array)
        self.rows: list[int] = []
        self.largest = 0

    @property
    def data(self) -> memoryview:
        raise AssertionError("it may lie in pieces, and all of it would be joined")

    def read(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> memoryview:
        self.rows += range(offset[0], offset[0] + shape[0])
        self.largest = max(self.largest, math.prod(shape) * 4)
        return self.held.read(offset, shape)


@pytest.mark.parametrize("block", [1, 24, 40, 1 << 20])
@pytest.mark.parametrize("stride", [(3, 1), (1, 7), (8, 2)])
def test_every_saved_row_is_read_once_and_no_more_of_them_at_a_time_than_a_block(
    monkeypatch: pytest.MonkeyPatch, stride: tuple[int, ...], block: int
) -> None:
    monkeypatch.setattr("tidemill.residency.contents._BLOCK_BYTES", block)
    page = Arena(sizes=[512], map_memory=map_plain, idle_spare_bytes=0).page(0)
    array = np.arange(21, dtype=np.float32).reshape(7, 3)
    tensor, place = Counted(array), entry(stride, shape=(7, 3))
    check_loadable(Ledger((place,)), {"w": tensor})
    put_bytes(place, page, tensor)
    assert tensor.rows == list(range(7)) and tensor.largest <= max(block, 12)
    assert bytes(tensor_bytes(place, [page]).data) == array.tobytes()


def test_a_number_is_put_in_too() -> None:
    page = Arena(sizes=[256], map_memory=map_plain, idle_spare_bytes=0).page(0)
    place = entry((), shape=())
    put_bytes(place, page, saved(np.float32(7).reshape(())))
    assert place.view(page.memory).item() == 7


def test_too_few_bytes_are_refused() -> None:
    page = Arena(sizes=[256], map_memory=map_plain, idle_spare_bytes=0).page(0)
    short = TensorBytes(dtype="F32", shape=(2, 3), data=memoryview(b"short"))
    with pytest.raises(CheckpointError, match=r"cannot load 'w': 0 bytes were read where 24 are needed"):
        put_bytes(entry(), page, short)


def contiguous_page(array: np.ndarray) -> torch.Tensor:
    page = torch.zeros(256, dtype=torch.uint8)
    page[64:88] = torch.from_numpy(array.reshape(-1).view(np.uint8).copy())
    return page


def test_a_row_major_tensor_is_handed_out_without_a_copy() -> None:
    page = Arena(sizes=[256], map_memory=map_plain, idle_spare_bytes=0).page(0)
    out = tensor_bytes(entry(), [page])
    page.memory[64] = 9
    assert out.data[0] == 9


def test_a_tensor_without_elements_has_no_bytes() -> None:
    empty = entry(slab=NO_SLAB, shape=(0, 3))
    assert tensor_bytes(empty, []).data.nbytes == 0
    assert checksum_of(empty, torch.zeros(0, dtype=torch.uint8)) == checksum_of(empty, torch.ones(1, dtype=torch.uint8))


RIGHT = np.zeros((2, 3), dtype=np.float32)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({}, r"missing \['w'\]"),
        ({"w": saved(RIGHT), "x": saved(RIGHT)}, r"not known here \['x'\]"),
        ({"w": saved(RIGHT.T)}, r"saved as F32 \[3, 2\], here it is F32 \[2, 3\]"),
        ({"w": saved(RIGHT, "I32")}, "saved as I32"),
    ],
    ids=["missing", "unexpected", "shape", "dtype"],
)
def test_what_does_not_fit_is_refused_by_name(tensors: dict[str, TensorBytes], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        check_loadable(Ledger((entry(),)), tensors)
