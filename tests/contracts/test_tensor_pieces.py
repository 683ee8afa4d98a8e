"""Tensors and pieces of them in memory: tidemill.contracts.checkpoint."""

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.contracts.checkpoint import SavedTensor, TensorBytes, TensorSpec, read_box

Array = np.ndarray[tuple[int, ...], np.dtype[Any]]


def held(array: Array, **piece: tuple[int, ...]) -> TensorBytes:
    return TensorBytes(dtype="F32", shape=array.shape, data=memoryview(array.tobytes()), **piece)


def counted(*shape: int) -> Array:
    return np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Array, tuple[int, ...], tuple[int, ...]]:
    """An array of 0 to 4 dimensions, and a box in it; either may have no element."""
    array = counted(*draw(st.lists(st.integers(0, 5), max_size=4)))
    bounds = [sorted(draw(st.tuples(st.integers(0, side), st.integers(0, side)))) for side in array.shape]
    return array, tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds)


@given(boxes())
def test_any_box_is_what_numpy_cuts_and_flat(case: tuple[Array, tuple[int, ...], tuple[int, ...]]) -> None:
    array, offset, shape = case
    wanted = array[tuple(slice(low, low + size) for low, size in zip(offset, shape, strict=True))].tobytes()
    for data in (memoryview(array.tobytes()), memoryview(array)):  # flat bytes, or as an array lies
        found = read_box(data, array.shape, offset, shape)
        assert (bytes(found), found.ndim, found.itemsize) == (wanted, 1, 1)
    tensor: SavedTensor = held(array)
    assert bytes(tensor.read(offset, shape)) == wanted


def test_a_box_that_is_one_stretch_is_a_view_and_another_a_copy() -> None:
    data = bytearray(counted(6, 4, 2).tobytes())
    tensor = TensorBytes(dtype="F32", shape=(6, 4, 2), data=memoryview(data))
    views = [((0, 0, 0), (6, 4, 2)), ((2, 0, 0), (3, 4, 2)), ((5, 1, 0), (1, 3, 2)), ((5, 3, 1), (1, 1, 1))]
    seen = [tensor.read(*box) for box in views]
    copies = [tensor.read((0, 1, 0), (2, 2, 2)), tensor.read((0, 0, 1), (6, 4, 1))]
    data[:] = bytes(len(data))
    assert not any(any(bytes(view)) for view in seen)
    assert all(any(bytes(copy)) for copy in copies)


def test_a_scalar_and_a_tensor_without_elements_can_be_read() -> None:
    assert np.frombuffer(held(np.float32(3).reshape(())).read((), ()), dtype=np.float32).tolist() == [3.0]
    assert bytes(held(counted(0, 4)).read((0, 1), (0, 2))) == b""
    assert bytes(held(counted(3, 4)).read((3, 0), (0, 4))) == b""


def test_what_says_nothing_of_a_whole_is_all_of_it_and_a_piece_says_where_it_lies() -> None:
    assert held(counted(2, 3)).spec == TensorSpec(dtype="F32", shape=(2, 3), whole=(2, 3), offset=(0, 0))
    piece = held(counted(2, 3), whole=(8, 3), offset=(4, 0))
    assert piece.spec == TensorSpec(dtype="F32", shape=(2, 3), whole=(8, 3), offset=(4, 0))
    assert held(np.float32(1).reshape(())).spec.offset == ()


@pytest.mark.parametrize("piece", [{}, {"whole": (8, 3), "offset": (4, 0)}])
def test_one_can_be_sent_to_another_process_with_its_bytes(piece: dict[str, tuple[int, ...]]) -> None:
    tensor = held(counted(2, 3), **piece)
    sent: TensorBytes = pickle.loads(pickle.dumps(tensor))
    assert (sent.dtype, sent.shape, bytes(sent.data)) == ("F32", (2, 3), bytes(tensor.data))
    assert sent.spec == tensor.spec


def test_a_view_of_an_array_is_sent_too() -> None:
    array = counted(4, 3)
    tensor = TensorBytes(dtype="F32", shape=(4, 3), data=memoryview(array))
    assert bytes(pickle.loads(pickle.dumps(tensor)).data) == array.tobytes()
