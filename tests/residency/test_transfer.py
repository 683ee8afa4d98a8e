"""Copies between slabs and pages (`tidemill.residency.transfer`)."""

import pytest
import torch

from tidemill.residency.transfer import CudaTransfer, HostTransfer, in_blocks, numbered, transfer_for
from tidemill.units import MIB


def test_a_host_copy_is_there_when_it_is_finished() -> None:
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    transfer = transfer_for(torch.device("cpu"))
    assert isinstance(transfer, HostTransfer)
    transfer.quiet()
    transfer.reserve([100])
    transfer.begin()
    transfer.copy(target, source)
    transfer.mark()()
    transfer.finish()
    transfer.give_back()
    assert torch.equal(source, target)


def test_of_many_copies_each_group_has_its_mark() -> None:
    transfer = transfer_for(torch.device("cpu"))
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    halves = [[(target[:50], source[:50])], [(target[50:80], source[50:80]), (target[80:], source[80:])], []]
    marks = transfer.copy_all(halves)
    for mark in marks:
        mark()
    assert len(marks) == 3 and torch.equal(source, target)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_many_copies_go_in_order_and_each_mark_says_when_its_own_are_there() -> None:
    transfer = CudaTransfer(numbered(torch.device("cuda")))
    sources = [torch.full((1 << 26,), value, dtype=torch.uint8).pin_memory() for value in (1, 2, 3)]
    targets = [torch.zeros(1 << 26, dtype=torch.uint8, device="cuda") for _ in sources]
    transfer.begin()
    marks = transfer.copy_all([pair] for pair in zip(targets, sources, strict=True))
    other = torch.cuda.Stream()
    for mark, target, value in zip(marks, targets, (1, 2, 3), strict=True):
        mark()
        with torch.cuda.stream(other):
            assert bool((target == value).all())
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_a_cpu_has_no_number() -> None:
    assert numbered(torch.device("cpu")) == torch.device("cpu")


def test_what_makes_a_block_is_taken_together_in_order() -> None:
    sizes = [300 * MIB, 212 * MIB, 1, 600 * MIB, 100 * MIB]
    assert in_blocks(sizes, lambda size: size) == [sizes[:2], [1], [600 * MIB], [100 * MIB]]
    assert in_blocks([], lambda size: size) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_storages_come_from_the_blocks_that_were_reserved_for_them() -> None:
    transfer = CudaTransfer(torch.device("cuda", 0))
    transfer.give_back()
    before = torch.cuda.memory_reserved()
    transfer.reserve([64 * MIB] * 16 + [300])
    held = torch.cuda.memory_reserved()
    assert held - before == 1024 * MIB
    storages = [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(16)]
    assert torch.cuda.memory_reserved() == held
    del storages
    transfer.give_back()
    assert torch.cuda.memory_reserved() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_cannot_be_reserved_is_no_failure() -> None:
    transfer = CudaTransfer(torch.device("cuda", 0))
    transfer.reserve([1 << 60])
    transfer.give_back()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_mark_says_when_what_was_queued_before_it_is_there() -> None:
    transfer = CudaTransfer(numbered(torch.device("cuda")))
    source, target = torch.ones(1 << 26, dtype=torch.uint8).pin_memory(), torch.zeros(1 << 26, device="cuda").byte()
    other = torch.cuda.Stream()
    transfer.begin()
    transfer.copy(target, source)
    transfer.mark()()
    with torch.cuda.stream(other):
        total = target.sum()
    other.synchronize()
    assert total.item() == 1 << 26


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_copy_sees_work_that_was_queued_before_it() -> None:
    transfer = CudaTransfer(torch.device("cuda", 0))
    source = torch.zeros(1 << 24, dtype=torch.uint8, device="cuda")
    target = torch.zeros(1 << 24, dtype=torch.uint8, pin_memory=True)
    for value in range(1, 20):
        source.fill_(value)
        transfer.begin()
        transfer.copy(target, source)
        transfer.finish()
        assert target.min() == target.max() == value


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_waiting_for_the_device_does_not_wait_for_copies() -> None:
    transfer = CudaTransfer(torch.device("cuda", 0))
    source = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.zeros(1 << 30, dtype=torch.uint8, pin_memory=True)
    total = source.sum()
    transfer.begin()
    transfer.copy(target, source)
    transfer.quiet()
    assert torch.cuda.current_stream().query() and not transfer._stream.query()
    transfer.finish()
    assert total.item() == 1 << 30 and bool(target.min() == 1)
