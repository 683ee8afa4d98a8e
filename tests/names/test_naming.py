"""tidemill.names.naming: boxes of one tensor under several names, both ways, against numpy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidemill.errors import DataError
from tidemill.names.naming import Cut, Naming, whole


def halves(name: str = "both", rows: int = 3, columns: int = 2) -> list[Cut]:
    return [
        Cut(name=f"{name}.{number}", tensor=name, start=(number, 0, 0), box=(1, rows, columns), shape=(rows, columns))
        for number in range(2)
    ]


def joined(rows: int = 3, columns: int = 2) -> Naming:
    shapes = {"first": (4,), "both": (2, rows, columns)}
    return Naming({"first": [whole("first", (4,))], "both": halves(rows=rows, columns=columns)}, shapes, {"f": "first"})


def test_each_name_is_a_view_of_the_tensor_that_holds_it() -> None:
    both = torch.arange(12.0).view(2, 3, 2)
    found = dict(joined().split_all([("first", torch.ones(4)), ("both", both)]))
    assert list(found) == ["first", "both.0", "both.1"]
    assert found["both.1"].shape == (3, 2) and found["both.1"].data_ptr() == both[1].data_ptr()
    assert torch.equal(torch.stack([found["both.0"], found["both.1"]]), both)


def test_specs_and_names_are_those_of_the_files() -> None:
    naming = joined()
    assert naming.specs({"both": ("F32", (2, 3, 2)), "first": ("BF16", (4,))}) == {
        "both.0": ("F32", (3, 2)),
        "both.1": ("F32", (3, 2)),
        "first": ("BF16", (4,)),
    }
    assert naming.names["both.1"].start == (1, 0, 0) and [cut.name for cut in naming.cuts("both")] == [
        "both.0",
        "both.1",
    ]
    assert naming.tied == {"f": "first"} and naming.shapes["both"] == (2, 3, 2)


@given(st.integers(0, 2), st.integers(0, 2), st.integers(0, 3), st.integers(0, 3), st.integers(1, 3))
def test_what_a_piece_holds_of_each_name_is_where_numpy_says(a: int, b: int, c: int, d: int, columns: int) -> None:
    """Pieces of any rows of any of the two, also with none."""
    (first, last), (top, end) = sorted((a, b)), sorted((c, d))
    array = np.arange(2 * 3 * columns, dtype=np.float32).reshape(2, 3, columns)
    piece = torch.from_numpy(array[first:last, top:end].copy())
    naming = joined(columns=columns)
    made = np.full_like(array, -1)
    for part in naming.overlaps("both", (first, top, 0), tuple(piece.shape)):
        expert = int(part.cut.name[-1])
        view = part.view(piece)
        assert view.shape == part.shape and math.prod(part.box) == view.numel()
        assert not view.numel() or view.untyped_storage().data_ptr() == piece.untyped_storage().data_ptr()
        at, size = part.offset, part.shape
        made[expert, at[0] : at[0] + size[0], at[1] : at[1] + size[1]] = view.numpy()
    wanted = np.full_like(array, -1)
    wanted[first:last, top:end] = array[first:last, top:end]
    assert np.array_equal(made, wanted)


@pytest.mark.parametrize(
    "cuts",
    [
        halves()[:1],
        [halves()[0], halves()[0]],
        halves(rows=4),
        [],
        [whole("both", (12,))],
        [halves()[0], Cut(name="x", tensor="both", start=(1, 0, 0), box=(1, 3, 2), shape=(5,))],
    ],
    ids=["a gap", "one twice", "beyond the end", "nothing", "other dimensions", "more elements than its box"],
)
def test_cuts_that_do_not_make_up_a_tensor_are_refused(cuts: list[Cut]) -> None:
    with pytest.raises(DataError, match="both of shape"):
        Naming({"both": cuts}, {"both": (2, 3, 2)}, {})


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(DataError, match=r"v and w would both be called w|w and v would both be called w"):
        Naming({"w": [whole("w", (1,))], "v": [whole("v", (1,), called="w")]}, {"w": (1,), "v": (1,)}, {})
