"""Single tensors in pages (`tidemill.residency.contents`)."""

import dataclasses
import itertools
import math
import pickle

import numpy as np
import pytest
import torch

from tidemill.contracts.checkpoint import TensorBytes
from tidemill.contracts.footprint import Part
from tidemill.errors import CheckpointError
from tidemill.residency.arena import Arena, claims_of
from tidemill.residency.contents import PagedTensor, check_loadable, checksum_of, put_bytes
from tidemill.residency.host_memory import map_plain
from tidemill.residency.ledger import NO_SLAB, Entry, Ledger
from tidemill.residency.pages import PageRun, plan_pages


def entry(stride: tuple[int, ...] = (3, 1), slab: int = 0, shape: tuple[int, ...] = (2, 3)) -> Entry:
    return Entry(name="w", part=Part.WEIGHTS, dtype=torch.float32, shape=shape, stride=stride, slab=slab, offset=64)


def saved(array: np.ndarray, dtype: str = "F32") -> TensorBytes:
    return TensorBytes(dtype=dtype, shape=array.shape, data=memoryview(array.tobytes()))


class Place:
    """A slab of one entry, whose pages lie anywhere: `order` says where in the mapping."""

    def __init__(self, at: Entry, page_bytes: int = 1 << 20, reverse: bool = False) -> None:
        self.entry = at
        size = -(-at.end // page_bytes) * page_bytes
        self.arena = Arena(plan_pages([size], page_bytes=page_bytes, spare_bytes=0), map_plain)
        whole = self.arena.run(0)
        pages = whole.pages[::-1] if reverse else whole.pages
        self.run = PageRun(memory=whole.memory, view=whole.view, pages=pages, page_bytes=page_bytes, bytes=size)
        claims = claims_of({at.name: (0, at.offset, at.end)}, page_bytes=page_bytes)
        self.reading = self.arena.read(claims, "a save")
        self.tensor = PagedTensor(at, self.run, self.reading)


# Pages that hold all of it, pages that hold a part each, and such pages in disorder.
PAGINGS = [(1 << 20, False), (16, False), (16, True)]


@pytest.mark.parametrize("paging", PAGINGS)
@pytest.mark.parametrize("stride", [(3, 1), (1, 2), (8, 2)])
def test_what_is_put_in_comes_out_row_major_whatever_the_strides(
    stride: tuple[int, ...], paging: tuple[int, bool]
) -> None:
    place = Place(entry(stride), *paging)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    put_bytes(place.entry, place.run, saved(array))
    out = place.tensor
    assert bytes(out.data) == b"".join(out.pieces()) == array.tobytes()
    assert out.data.readonly and all(piece.readonly for piece in out.pieces())
    assert (out.dtype, out.shape, out.nbytes) == ("F32", (2, 3), 24)
    assert checksum_of(place.entry, place.run) == checksum_of(entry(), contiguous_slab(array))


@pytest.mark.parametrize("paging", PAGINGS)
@pytest.mark.parametrize("stride", [(3, 1), (1, 7), (8, 2)])
def test_every_box_is_what_numpy_cuts(stride: tuple[int, ...], paging: tuple[int, bool]) -> None:
    place = Place(entry(stride, shape=(7, 3)), *paging)
    array = np.arange(21, dtype=np.float32).reshape(7, 3)
    put_bytes(place.entry, place.run, saved(array))
    for row, rows, column, columns in itertools.product(range(7), range(8), range(3), range(4)):
        if row + rows <= 7 and column + columns <= 3:
            box = array[row : row + rows, column : column + columns]
            assert bytes(place.tensor.read((row, column), (rows, columns))) == box.tobytes()


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


@pytest.mark.parametrize("paging", PAGINGS)
@pytest.mark.parametrize("block", [1, 24, 40, 1 << 20])
@pytest.mark.parametrize("stride", [(3, 1), (1, 7), (8, 2)])
def test_every_saved_row_is_read_once_and_no_more_of_them_at_a_time_than_a_block(
    monkeypatch: pytest.MonkeyPatch, stride: tuple[int, ...], block: int, paging: tuple[int, bool]
) -> None:
    monkeypatch.setattr("tidemill.residency.contents._BLOCK_BYTES", block)
    array = np.arange(21, dtype=np.float32).reshape(7, 3)
    tensor, place = Counted(array), Place(entry(stride, shape=(7, 3)), *paging)
    check_loadable(Ledger((place.entry,)), {"w": tensor})
    put_bytes(place.entry, place.run, tensor)
    assert tensor.rows == list(range(7)) and tensor.largest <= max(block, 12)
    assert bytes(place.tensor.data) == array.tobytes()


def test_a_number_is_put_in_too() -> None:
    place = Place(entry((), shape=()))
    put_bytes(place.entry, place.run, saved(np.float32(7).reshape(())))
    assert np.frombuffer(place.tensor.data, np.float32) == 7


@pytest.mark.parametrize("stride", [(3, 1), (1, 2)])
def test_too_few_bytes_are_refused(stride: tuple[int, ...]) -> None:
    place = Place(entry(stride))
    short = TensorBytes(dtype="F32", shape=(2, 3), data=memoryview(b"short"))
    with pytest.raises(CheckpointError, match=r"cannot load 'w': 0 bytes were read where 24 are needed"):
        put_bytes(place.entry, place.run, short)


def contiguous_slab(array: np.ndarray) -> torch.Tensor:
    slab = torch.zeros(256, dtype=torch.uint8)
    slab[64:88] = torch.from_numpy(array.reshape(-1).view(np.uint8).copy())
    return slab


@pytest.mark.parametrize(("reverse", "count"), [(False, 1), (True, 2)])
def test_a_row_major_tensor_is_handed_out_without_a_copy_in_as_many_pieces_as_it_must(
    reverse: bool, count: int
) -> None:
    place = Place(entry(), 16, reverse)
    pieces = list(place.tensor.pieces())
    assert len(pieces) == count
    place.run.put(64, memoryview(bytes(range(24))))
    assert b"".join(pieces) == bytes(range(24))


def test_a_tensor_without_elements_has_no_bytes() -> None:
    empty = entry(slab=NO_SLAB, shape=(0, 3))
    tensor = PagedTensor(empty, None, Place(entry()).reading)
    assert tensor.data.nbytes == tensor.nbytes == len(list(tensor.pieces())) == 0
    assert checksum_of(empty, torch.zeros(0, dtype=torch.uint8)) == checksum_of(empty, torch.ones(1, dtype=torch.uint8))


def test_a_tensor_that_was_let_go_of_is_not_read_again() -> None:
    place = Place(entry())
    assert place.tensor.data.nbytes == 24
    place.reading.let_go("w")
    for read in (place.tensor.pieces, lambda: place.tensor.data, lambda: place.tensor.read((0, 0), (1, 1))):
        with pytest.raises(CheckpointError, match=r"'w' from the host copy: it was let go of"):
            read()


def test_a_tensor_is_sent_as_its_bytes() -> None:
    place = Place(dataclasses.replace(entry(), whole=(4, 3), offset_in_whole=(2, 0)), 16, True)
    place.run.put(64, memoryview(bytes(range(24))))
    sent: TensorBytes = pickle.loads(pickle.dumps(place.tensor))
    assert (bytes(sent.data), sent.spec) == (bytes(range(24)), place.tensor.spec)
    assert sent.spec.whole == (4, 3) and sent.spec.offset == (2, 0)


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
