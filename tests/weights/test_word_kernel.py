"""tidemill.weights.word_kernel: on a GPU, or in Triton's interpreter where there is none; equal to its slow twin."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read when Triton is imported, for the whole process.
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from tidemill.weights.word_kernel import can_cast, kernel_sums
from tidemill.weights.word_sums import TILE, word_sums

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPAN = 16 * TILE


def raw_bytes(size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).to(DEVICE)


def numbers(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def test_sums_are_those_of_the_slow_twin_at_every_length_and_address() -> None:
    base = raw_bytes(4 * SPAN * 3)
    lengths = [
        0,
        1,
        2,
        3,
        4,
        5,
        63,
        64,
        *(4 * n + d for n in (TILE, SPAN, SPAN + TILE, 2 * SPAN) for d in (-1, 0, 1, 7)),
    ]
    tensors = [base[start : start + length] for length in lengths for start in (0, 1, 2, 3, 4, 8, 16)]
    found = kernel_sums(tensors, [tensor.dtype for tensor in tensors])
    assert torch.equal(found, word_sums(tensors))


def test_many_small_tensors_are_summed_together() -> None:
    base = raw_bytes(1 << 14)
    tensors = [base[start : start + start % 97] for start in range(0, 1 << 13, 3)]
    assert torch.equal(kernel_sums(tensors, [torch.uint8] * len(tensors)), word_sums(tensors))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 2, 3, 1000, 2 * TILE - 1, 2 * TILE, 2 * TILE + 1, 2 * SPAN + 2 * TILE + 5])
def test_float32_is_summed_as_what_it_would_be_cast_to(dtype: torch.dtype, size: int) -> None:
    tensor = numbers(size) * 100
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        tensor = tensor.bfloat16().float()  # the interpreter rounds towards zero, no GPU does
    assert can_cast(tensor, dtype)
    assert torch.equal(kernel_sums([tensor], [dtype]), word_sums([tensor.to(dtype)]))


def test_what_the_kernel_cannot_cast_it_says() -> None:
    assert not can_cast(numbers(8).double(), torch.bfloat16)
    assert not can_cast(numbers(8), torch.float32)
    assert not can_cast(numbers(9)[1:], torch.bfloat16)
    assert not can_cast(numbers(64).view(8, 8).t(), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_infinities_and_nan_are_those_of_a_copy(dtype: torch.dtype) -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (1 << 22,), dtype=torch.int64).to(torch.int32).cuda()
    tensor = bits.view(torch.float32)
    target = torch.empty_like(tensor, dtype=dtype)
    torch._foreach_copy_([target], [tensor])
    assert torch.equal(kernel_sums([tensor], [dtype]), word_sums([tensor.to(dtype)]))
    assert torch.equal(kernel_sums([tensor], [dtype]), word_sums([target]))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_nothing_waits_for_the_device() -> None:
    tensors = [numbers(1 << 20, seed) for seed in range(20)]
    kernel_sums(tensors, [torch.bfloat16] * 20)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernel_sums(tensors, [torch.bfloat16] * 20)
    finally:
        torch.cuda.set_sync_debug_mode("default")
