import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.checkpoint.safetensors_header import (
    ITEM_BYTES,
    Slot,
    fits,
    header_size,
    lay_out,
    pack_header,
    parse_header,
)
from tidemill.errors import CheckpointError

FIELD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def parse(fields: object, data: int = 8) -> None:
    text = json.dumps(fields).encode()
    parse_header(text, 8 + len(text) + data)


def test_data_starts_at_a_multiple_of_4096_and_every_tensor_is_aligned_to_its_elements() -> None:
    slots = lay_out({"b": ("U8", (3,)), "a": ("F32", (5,)), "c": ("I64", ()), "d": ("BF16", (0, 4))})
    assert len(pack_header(slots, {})) == 4096
    assert all(slot.begin % ITEM_BYTES[slot.dtype] == 0 for slot in slots)
    assert [slot.name for slot in slots] == ["c", "a", "d", "b"]


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=12).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 5), max_size=3).map(tuple)),
        max_size=8,
    )
)
def test_what_is_packed_is_parsed_back(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    slots = lay_out(tensors)
    packed = pack_header(slots, {"format": "pt"})
    size = sum(ITEM_BYTES[dtype] * math.prod(shape) for dtype, shape in tensors.values())
    assert header_size(packed, len(packed) + size) == len(packed) - 8
    header = parse_header(packed[8:], len(packed) + size)
    assert {slot.name: (slot.dtype, slot.shape) for slot in header.slots} == tensors
    assert header.data_start % 4096 == 0 and header.metadata == {"format": "pt"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ([], "not a JSON object"),
        ({"a": FIELD, "b": FIELD}, "overlaps"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "hole"),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, "asks for"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, "asks for"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, "shape"),
        ({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}, "shape"),
        ({"a": {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]}}, "shape"),
        ({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}, "range"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, "range"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}, "offsets"),
        ({"a": {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}}, "unknown dtype"),
        ({"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}, "unknown dtype"),
        ({"a": FIELD | {"more": 1}}, "something else"),
        ({"a": FIELD, "__metadata__": {"x": 1}}, "metadata"),
        ({"a": FIELD, "__metadata__": []}, "metadata"),
    ],
)
def test_a_hostile_header_is_refused_with_what_is_wrong(fields: object, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        parse(fields)


def test_names_given_twice_are_refused() -> None:
    field = json.dumps(FIELD)
    text = f'{{"a": {field}, "a": {field}}}'.encode()
    with pytest.raises(CheckpointError, match="'a' is there twice"):
        parse_header(text, 8 + len(text) + 8)


def test_deep_nesting_huge_numbers_and_broken_text_are_refused() -> None:
    for text in (b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b"\xff\xfe", b""):
        with pytest.raises(CheckpointError, match="not JSON"):
            parse_header(text, 8 + len(text))


@pytest.mark.parametrize("size", [0, 7, 8, 4096])
def test_a_header_longer_than_the_file_is_refused(size: int) -> None:
    with pytest.raises(CheckpointError, match="bytes"):
        header_size((2**63).to_bytes(8, "little")[:size], size)


def test_a_dtype_that_the_format_has_not_and_its_reserved_name_cannot_be_written() -> None:
    with pytest.raises(CheckpointError, match="'complex'"):
        lay_out({"a": ("complex", (1,))})
    with pytest.raises(CheckpointError, match="reserves"):
        lay_out({"__metadata__": ("U8", (1,))})


def test_only_tensors_that_follow_each_other_with_the_bytes_they_take_fit() -> None:
    first, second = Slot("a", "F32", (2, 3), 0, 24), Slot("b", "U8", (), 24, 25)
    assert fits([]) and fits([first, second, Slot("none", "I64", (0, 4), 25, 25)])
    wrong = [
        Slot("a", "U8", (), 24, 25),
        Slot("b", "U8", (), 25, 26),
        Slot("b", "U8", (), 23, 24),
        Slot("b", "F16", (), 24, 25),
        Slot("b", "F3", (), 24, 25),
        Slot("b", "U8", (-1, -1), 24, 25),
        Slot("b", "U8", (True,), 24, 25),
        Slot("b", "U8", (1.0,), 24, 25),  # type: ignore[arg-type]
        Slot(1, "U8", (), 24, 25),  # type: ignore[arg-type]
        Slot("b", ["U8"], (), 24, 25),  # type: ignore[arg-type]
    ]
    assert not any(fits([first, slot]) for slot in wrong)
    assert not fits([second, first]) and not fits([second])
