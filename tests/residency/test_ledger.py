"""Entries and the ledger (`tidemill.residency.ledger`, `tidemill.residency.dtypes`)."""

import dataclasses

import pytest
import torch

from tidemill.contracts.footprint import Part
from tidemill.errors import ResidencyError
from tidemill.residency.dtypes import dtype_name
from tidemill.residency.ledger import Entry, Ledger


def entry(
    name: str = "w", shape: tuple[int, ...] = (2, 3), stride: tuple[int, ...] = (3, 1), offset: int = 512
) -> Entry:
    return Entry(name=name, part=Part.WEIGHTS, dtype=torch.float32, shape=shape, stride=stride, slab=0, offset=offset)


def test_a_ledger_that_covers_its_names_is_silent() -> None:
    Ledger((entry("a"), entry("b"))).check_covers(["b", "a"])


def test_state_born_after_the_freeze_is_named() -> None:
    with pytest.raises(ResidencyError, match=r"exp_avg.*optimizer state included"):
        Ledger((entry("w"),)).check_covers(["w", "w.exp_avg"])


def test_an_entry_without_a_tensor_is_named() -> None:
    with pytest.raises(ResidencyError, match="gone"):
        Ledger((entry("w"), entry("gone"))).check_covers(["w"])


def test_an_entry_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        entry().offset = 0


def test_a_view_lies_where_the_entry_says_in_a_slab_that_starts_anywhere() -> None:
    buffer = torch.arange(4096, dtype=torch.int32).view(torch.uint8)
    for slab, first in ((buffer, 128), (buffer[1024:], 384)):
        view = dataclasses.replace(entry(), dtype=torch.int32).view(slab)
        assert view.tolist() == [[first, first + 1, first + 2], [first + 3, first + 4, first + 5]]
        assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [((2, 3), (3, 1), True), ((2, 3), (1, 2), False), ((2, 3), (4, 1), False), ((), (), True), ((1, 3), (9, 1), True)],
)
def test_row_major_is_what_torch_calls_contiguous(
    shape: tuple[int, ...], stride: tuple[int, ...], expected: bool
) -> None:
    assert entry(shape=shape, stride=stride).row_major is expected
    assert torch.empty(100).as_strided(shape, stride).is_contiguous() is expected


def test_bytes_are_those_of_the_elements() -> None:
    assert entry(stride=(8, 2)).bytes == 24


def test_a_type_without_a_name_in_safetensors_is_refused() -> None:
    assert dtype_name(torch.bfloat16) == "BF16"
    with pytest.raises(ResidencyError, match="complex64"):
        dtype_name(torch.complex64)
