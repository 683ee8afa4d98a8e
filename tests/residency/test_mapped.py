"""tidemill.residency.mapped and tidemill.compat.cuda_driver: device memory that comes and goes behind one address."""

import gc

import pytest
import torch

from tidemill.compat.cuda_driver import CudaDriverError, call
from tidemill.residency.mapped import MappedMemory, can_map, give_back
from tidemill.units import MIB

GPU = torch.device("cuda")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def used() -> int:
    gc.collect()  # what an earlier test left would else go in the midst of this one
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_memory_of_a_cpu_is_never_mapped() -> None:
    assert not can_map(torch.device("cpu"))


@pytest.mark.gpu
@needs_gpu
def test_bytes_leave_the_device_and_come_back_at_the_same_address() -> None:
    assert can_map(GPU)
    memory = MappedMemory(100 * MIB + 3, GPU)
    flat, address = memory.flat, memory.flat.data_ptr()
    flat.fill_(7)
    kept = flat.cpu()
    awake = used()  # behind the first use: kernels are loaded with it
    memory.free()
    memory.free()
    assert not memory.resident
    give_back(GPU)
    assert awake - used() >= 100 * MIB
    memory.allocate()
    memory.allocate()
    assert memory.resident
    assert memory.flat is flat
    assert flat.data_ptr() == address
    flat.copy_(kept)
    assert int((flat == 7).sum()) == 100 * MIB + 3


@pytest.mark.gpu
@needs_gpu
def test_what_is_asked_for_again_before_it_was_given_back_is_still_there() -> None:
    memory = MappedMemory(8 * MIB, GPU)
    memory.flat.fill_(5)
    memory.free()
    memory.allocate()
    give_back(GPU)
    assert memory.resident
    assert bool((memory.flat == 5).all())


@pytest.mark.gpu
@needs_gpu
def test_many_that_are_freed_are_given_back_in_any_order_and_come_back_each_by_itself() -> None:
    before = used()
    many = [MappedMemory((n % 3 + 1) * 2 * MIB, GPU) for n in range(30)]
    for number, memory in enumerate(many):
        memory.flat.fill_(number)
    awake = used()
    for number in (7, 3, 8, 20, 1, 2, 29, 0):
        many[number].free()
    give_back(GPU)
    assert awake - used() == sum(many[n].flat.nbytes for n in (7, 3, 8, 20, 1, 2, 29, 0))
    for memory in many:
        memory.allocate()
    assert used() == awake
    kept = [n for n in range(30) if n not in (7, 3, 8, 20, 1, 2, 29, 0)]
    assert all(bool((many[n].flat == n).all()) for n in kept)
    for memory in many:
        memory.free()
    give_back(GPU)
    assert used() - before < 4 * MIB


@pytest.mark.gpu
@needs_gpu
def test_a_full_device_takes_what_was_freed_and_not_given_back() -> None:
    first = MappedMemory(int(torch.cuda.mem_get_info()[0] * 0.6) // MIB * MIB, GPU)
    first.free()
    second = MappedMemory(first.flat.nbytes, GPU)
    assert second.resident
    with pytest.raises(MemoryError):
        first.allocate()
    second.free()
    first.allocate()
    first.free()
    give_back(GPU)


@pytest.mark.gpu
@needs_gpu
def test_a_captured_graph_replays_after_sleep_and_wake() -> None:
    memory = MappedMemory(4 * MIB, GPU)
    numbers = memory.flat.view(torch.float32)
    numbers.fill_(1.0)
    twice = torch.zeros_like(numbers)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        twice.copy_(numbers * 2)
    numbers.fill_(3.0)
    kept = numbers.cpu()
    torch.cuda.synchronize()
    memory.free()
    give_back(GPU)
    memory.allocate()
    numbers.copy_(kept)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(twice.cpu(), kept * 2)


@pytest.mark.gpu
@needs_gpu
def test_memory_goes_with_the_last_view_of_it() -> None:
    before = used()
    memory = MappedMemory(64 * MIB, GPU)
    view = memory.flat[:8]
    del memory
    gc.collect()
    assert used() - before >= 64 * MIB
    view.fill_(1)
    del view
    gc.collect()
    assert used() - before < 4 * MIB


@pytest.mark.gpu
@needs_gpu
def test_what_does_not_fit_is_told_in_bytes_and_takes_nothing() -> None:
    before = used()
    with pytest.raises(MemoryError, match=r"do not fit on cuda.* are free"):
        MappedMemory(torch.cuda.mem_get_info()[1] * 2, GPU)
    memory = MappedMemory(64 * MIB, GPU)
    memory.free()
    give_back(GPU)
    free = torch.cuda.mem_get_info()[0]
    hog = torch.empty(free - 32 * MIB, dtype=torch.uint8, device=GPU)
    with pytest.raises(MemoryError):
        memory.allocate()
    assert not memory.resident
    del hog  # PyTorch keeps it in its cache, which is emptied for the mapping
    memory.allocate()
    del memory
    gc.collect()
    assert used() - before < 4 * MIB


@pytest.mark.gpu
@needs_gpu
def test_a_call_that_the_driver_refuses_is_an_error_with_its_words() -> None:
    torch.cuda.synchronize()
    with pytest.raises(CudaDriverError, match="cuMemUnmap answered 1"):
        call("cuMemUnmap", 0, 0)
