from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpoint.pieces import Array, grids

from tidemill.checkpoint.cover import cover_problems
from tidemill.contracts.checkpoint import TensorBytes, TensorSpec


def spec(shape: tuple[int, ...], offset: tuple[int, ...], whole: tuple[int, ...], dtype: str = "F32") -> TensorSpec:
    return TensorSpec(dtype=dtype, shape=shape, whole=whole, offset=offset)


def problems(*specs: TensorSpec) -> str:
    return "; ".join(cover_problems([(f"file-{index}", {"w": one}) for index, one in enumerate(specs)]))


def counts(array: Array, specs: list[TensorSpec]) -> Array:
    """How often each element is there: the slow twin."""
    seen = np.zeros(array.shape, dtype=int)
    for one in specs:
        seen[tuple(slice(at, at + size) for at, size in zip(one.offset, one.shape, strict=True))] += 1
    return seen


@given(grids(), st.data())
def test_a_grid_is_whole_and_what_is_not_is_known_from_counting(
    grid: tuple[Array, str, list[TensorBytes]], data: st.DataObject
) -> None:
    array, _, pieces = grid
    specs = [piece.spec for piece in pieces]
    assert problems(*specs) == ""
    chosen = data.draw(st.lists(st.sampled_from(specs), min_size=1, max_size=len(specs) + 2))
    seen = counts(array, chosen)
    found = problems(*chosen)
    assert (found == "") == bool((seen == 1).all())
    if "the first missing at" in found:
        assert str([int(at) for at in np.argwhere(seen == 0)[0]]) in found
    elif found:
        assert "overlap" in found and (seen > 1).any()


@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ([spec((2,), (0,), (6,)), spec((2,), (4,), (6,))], "[6] has 4 of 6 elements, the first missing at [2]"),
        ([spec((4,), (0,), (6,)), spec((4,), (2,), (6,))], "file-0 and file-1 have pieces of w that overlap, at [2]"),
        ([spec((), (), ()), spec((), (), ())], "file-0 and file-1 have pieces of w that overlap, at []"),
        ([spec((2,), (0,), (4,)), spec((2,), (2,), (4,), "BF16")], "as BF16 of shape [4], file-0 as F32 of shape [4]"),
        ([spec((2,), (0,), (4,)), spec((2,), (2,), (5,))], "file-1 has a piece of w as F32 of shape [5], file-0 as"),
        ([spec((4,), (2,), (4,))], "of shape [4] at [2], which is not inside the whole of shape [4]"),
        ([spec((4,), (0, 0), (4,))], "which is not inside"),
        ([spec((0, 3), (0, 0), (4, 3))], "has 0 of 12 elements, the first missing at [0, 0]"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_file_tensor_and_place(specs: list[TensorSpec], said: str) -> None:
    assert said in problems(*specs)


def test_tensors_without_elements_and_pieces_without_them_are_whole() -> None:
    assert problems(spec((0, 3), (0, 0), (0, 3)), spec((0, 3), (0, 0), (0, 3))) == ""
    assert problems(spec((4,), (0,), (4,)), spec((0,), (4,), (4,)), spec((0,), (2,), (4,))) == ""


def test_of_many_wrong_tensors_three_are_named_and_the_others_counted() -> None:
    half = spec((2,), (0,), (4,))
    found = cover_problems([("file", {f"w{index}": half for index in range(9)} | {"good": replace(half, whole=(2,))})])
    assert len(found) == 4 and found[0].startswith("w0 ") and found[-1] == "so it is with 6 tensors more"
