"""tidemill.checkpoint.numbers and tidemill.checkpoint.difference against torch."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidemill.checkpoint.difference import difference
from tidemill.checkpoint.numbers import change_of, in_blocks, statistics_of, values_of
from tidemill.contracts.checkpoint import TensorBytes

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def held(tensor: torch.Tensor) -> TensorBytes:
    """A tensor as a checkpoint holds it."""
    dtype = next(name for name, known in DTYPES.items() if known == tensor.dtype)
    flat = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return TensorBytes(dtype=dtype, shape=tuple(tensor.shape), data=memoryview(flat.numpy().tobytes()))


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_pattern_of_bits_is_the_number_that_torch_sees(dtype: str) -> None:
    width = torch.empty(0, dtype=DTYPES[dtype]).element_size()
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (4096 * width,), dtype=torch.uint8, generator=generator)
    if width <= 2:
        codes = np.arange(256**width, dtype=f"<u{width}")
        raw = torch.from_numpy(codes.view(np.uint8).copy())
    if dtype == "BOOL":
        raw = raw % 2
    wanted = raw.view(DTYPES[dtype]).to(torch.float64).numpy()
    np.testing.assert_array_equal(values_of(memoryview(raw.numpy().tobytes()), dtype), wanted)


@given(st.lists(st.integers(0, 7), max_size=4), st.integers(1, 100))
def test_blocks_cover_a_tensor_once_in_order_within_their_limit(shape: list[int], limit: int) -> None:
    whole = np.arange(math.prod(shape)).reshape(shape)
    found: list[Any] = []
    for offset, box in in_blocks("U8", tuple(shape), limit):
        assert math.prod(box) <= max(limit, 1)
        cut = tuple(slice(start, start + size) for start, size in zip(offset, box, strict=True))
        found += whole[cut].reshape(-1).tolist()
    assert found == whole.reshape(-1).tolist()


@given(st.lists(st.floats(width=32), max_size=20))
def test_statistics_are_those_of_the_finite_elements(values: list[float]) -> None:
    told = statistics_of(held(torch.tensor(values, dtype=torch.float32)))
    finite = np.array([value for value in values if math.isfinite(value)], dtype=np.float64)
    assert told.nonfinite == len(values) - len(finite)
    if not len(finite):
        assert math.isnan(told.min) and math.isnan(told.rms)
        return
    assert (told.min, told.max) == (finite.min(), finite.max())
    assert told.mean == pytest.approx(finite.mean(), rel=1e-9, abs=1e-300)
    assert told.rms == pytest.approx(math.sqrt((finite**2).mean()), rel=1e-9)


@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (0, 3)])
def test_a_change_says_how_many_how_far_and_how_far_of_all(shape: tuple[int, ...]) -> None:
    one = torch.randn(shape, dtype=torch.float32, generator=torch.Generator().manual_seed(0))
    other = one * 1.25
    seen: list[int] = []
    assert change_of(held(one), held(one.clone()), seen.append) is None
    change = change_of(held(one), held(other), seen.append)
    if not one.numel():
        assert change is None and seen == []
        return
    gaps = (other.double() - one.double()).abs()
    assert change is not None and sum(seen) == 2 * 4 * one.numel()
    assert change.elements == one.numel() and change.largest == pytest.approx(float(gaps.max()))
    assert change.mean == pytest.approx(float(gaps.mean())) and change.relative == pytest.approx(0.25, rel=1e-6)


def test_bits_decide_and_numbers_tell() -> None:
    nan, zero = torch.tensor([math.nan, 1.0]), torch.tensor([0.0, 1.0])
    assert change_of(held(nan), held(nan.clone()), lambda count: None) is None
    minus = change_of(held(zero), held(torch.tensor([-0.0, 1.0])), lambda count: None)
    assert minus is not None and (minus.elements, minus.largest, minus.relative) == (1, 0.0, 0.0)
    lost = change_of(held(zero), held(nan), lambda count: None)
    assert lost is not None and lost.largest == lost.relative == math.inf
    assert change_of(held(torch.zeros(2)), held(torch.ones(2)), lambda count: None).relative == math.inf  # type: ignore[union-attr]
    half = torch.tensor([1.0, 1.0009765625]).bfloat16()
    assert change_of(held(torch.tensor([1.0, 1.0])), held(half), lambda count: None) is None


def test_every_part_is_compared(make_rig: Any, tmp_path: Path) -> None:
    from tidemill.checkpoint.catalog import newest

    found = []
    for name in ("one", "other"):
        rig = make_rig(tmp_path / name)
        rig.restore()
        rig.run(2)
        found.append(newest(rig.folder)[0])
    same = difference(*found)
    # Random states are a part of the state, and are those of this one process.
    assert not same.tensors and not same.settings and not same.identity and same.same_tensors >= 2
