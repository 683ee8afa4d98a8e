"""Checksums of tensors (`tidemill.weights.checksum`)."""

import pytest
import torch

from tidemill.weights import checksum as module
from tidemill.weights.checksum import checksum, word_sum

MASK, SPREAD = (1 << 64) - 1, 0x9E3779B97F4A7C15


def fold(word: int) -> int:
    return word ^ word >> 32


def weight(position: int) -> int:
    return (fold((position + 1) * SPREAD & MASK) * SPREAD & MASK) | 1


def slow_word_sum(tensor: torch.Tensor, chunk: int) -> int:
    """The same in Python's integers."""
    raw = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())
    raw += bytes(-len(raw) % 4)
    words = [int.from_bytes(raw[i : i + 4], "little", signed=True) for i in range(0, len(raw), 4)]
    total = tensor.numel()
    for start in range(0, len(words), chunk):
        part = sum(word * weight(i) for i, word in enumerate(words[start : start + chunk]))
        total = (total * SPREAD + part) & MASK
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (8, 9), (3, 5, 7)])
def test_the_word_sum_is_the_one_of_pythons_integers(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CHUNK", 5)
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    assert word_sum(tensor) == slow_word_sum(tensor, 5)


@pytest.mark.parametrize("function", [checksum, word_sum])
def test_equal_bytes_have_equal_checksums_whatever_the_strides(function) -> None:
    base = torch.randn(6, 10)
    assert function(base.t()) == function(base.t().contiguous())
    assert function(base[1:, 3:]) == function(base[1:, 3:].clone())
    assert function(base.view(-1)[1:]) == function(base.view(-1)[1:].clone())


@pytest.mark.parametrize("function", [checksum, word_sum])
def test_every_single_bit_counts(function) -> None:
    tensor = torch.randn(33)
    before = function(tensor)
    bits = tensor.view(torch.int32)
    seen = {before}
    for element in range(33):
        for bit in range(32):
            bits[element] ^= 1 << bit
            seen.add(function(tensor))
            bits[element] ^= 1 << bit
    assert len(seen) == 1 + 33 * 32
    assert function(tensor) == before


@pytest.mark.parametrize("function", [checksum, word_sum])
def test_swapped_rows_and_swapped_halves_of_a_word_are_noticed(function) -> None:
    tensor = torch.randn(16, 4)
    swapped = tensor[torch.tensor([1, 0, *range(2, 16)])]
    halves = tensor.view(-1, 2).flip(1)
    assert len({function(tensor), function(swapped), function(halves)}) == 3


@pytest.mark.parametrize("function", [checksum, word_sum])
def test_the_sign_of_zero_and_the_payload_of_nan_count(function) -> None:
    assert function(torch.tensor([0.0])) != function(torch.tensor([-0.0]))
    assert function(torch.tensor([float("nan")])) == function(torch.tensor([float("nan")]))


def test_a_checksum_does_not_pin_the_storage_that_it_reads() -> None:
    tensor = torch.randn(8)
    checksum(tensor)
    assert tensor.untyped_storage().resizable()


def test_any_two_flipped_signs_give_a_checksum_of_their_own() -> None:
    tensor = torch.randn(64)
    seen = {word_sum(tensor)}
    for first in range(64):
        for second in range(first):
            flipped = tensor.clone()
            flipped[[first, second]] *= -1.0
            seen.add(word_sum(flipped))
    assert len(seen) == 1 + 64 * 63 // 2


def test_zeros_of_different_lengths_differ() -> None:
    assert len({word_sum(torch.zeros(n)) for n in range(20)}) == 20
