"""Checksums of tensors (`tidemill.weights.checksum`)."""

import importlib.util

import pytest
import torch

from tidemill.weights import checksum as module
from tidemill.weights.checksum import Checksums, checksum, checksums
from tidemill.weights.word_sums import word_sum


def test_equal_bytes_have_equal_checksums_whatever_the_strides() -> None:
    base = torch.randn(6, 10)
    assert checksum(base.t()) == checksum(base.t().contiguous())
    assert checksum(base[1:, 3:]) == checksum(base[1:, 3:].clone())
    assert checksum(base.view(-1)[1:]) == checksum(base.view(-1)[1:].clone())


def test_every_single_bit_counts() -> None:
    tensor = torch.randn(33)
    bits = tensor.view(torch.int32)
    seen = {checksum(tensor)}
    for element in range(33):
        for bit in range(32):
            bits[element] ^= 1 << bit
            seen.add(checksum(tensor))
            bits[element] ^= 1 << bit
    assert len(seen) == 1 + 33 * 32


def test_swapped_rows_and_swapped_halves_of_a_word_are_noticed() -> None:
    tensor = torch.randn(16, 4)
    swapped = tensor[torch.tensor([1, 0, *range(2, 16)])]
    assert len({checksum(tensor), checksum(swapped), checksum(tensor.view(-1, 2).flip(1))}) == 3


def test_the_sign_of_zero_and_the_payload_of_nan_count() -> None:
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    assert checksum(torch.tensor([float("nan")])) == checksum(torch.tensor([float("nan")]))


def test_a_checksum_does_not_pin_the_storage_that_it_reads() -> None:
    tensor = torch.randn(8)
    checksum(tensor)
    assert tensor.untyped_storage().resizable()


def test_checksums_come_in_order_as_of_the_dtype_asked_for_and_are_forgotten() -> None:
    tensors = {name: torch.randn(5) for name in "cab"}
    sums = Checksums()
    for name, tensor in tensors.items():
        sums.add(name, tensor, torch.bfloat16)
    assert list(sums.take().items()) == [(name, checksum(tensor.bfloat16())) for name, tensor in tensors.items()]
    assert sums.take() == {}


def test_what_waits_for_its_sum_is_summed_before_it_is_too_much_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[list[int]] = []

    def sums(tensors, dtypes):
        launched.append([tensor.numel() for tensor in tensors])
        return torch.arange(len(tensors))

    monkeypatch.setattr(module, "_sums", lambda: sums)
    monkeypatch.setattr(module, "_WAITING", 100)
    waiting = Checksums()
    for number in range(6):
        waiting.add(str(number), torch.empty(10 + number, device="meta"), torch.float32)
    assert launched == [[10, 11, 12], [13, 14]]
    waiting.queue()
    assert launched[2:] == [[15]]
    assert list(waiting.take()) == [str(number) for number in range(6)]
    assert len(launched) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fast", [True, False])
def test_on_a_gpu_they_are_the_sums_of_words_with_and_without_triton(
    fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module._sums.cache_clear()
    if not fast:
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))
    try:
        assert module._sums() is (module._fast_sums if fast else module._slow_sums)
        tensors = {
            "cast": torch.randn(1000, 33, device="cuda"),
            "across": torch.randn(64, 32, device="cuda").t(),
            "anywhere": torch.randn(1001, device="cuda")[1:],
            "half": torch.randn(77, device="cuda").half(),
            "nothing": torch.empty(0, 4, device="cuda"),
        }
        sums = Checksums()
        for name, tensor in tensors.items():
            sums.add(name, tensor, torch.bfloat16)
        assert sums.take() == {name: word_sum(tensor.bfloat16()) for name, tensor in tensors.items()}
        assert checksums(tensors.items()) == {name: word_sum(tensor) for name, tensor in tensors.items()}
    finally:
        module._sums.cache_clear()
