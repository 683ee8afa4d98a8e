"""Copies between slabs and pages (`tidemill.residency.transfer`)."""

import pytest
import torch

from tidemill.residency.transfer import CudaTransfer, HostTransfer


def test_a_host_copy_is_there_when_it_is_finished() -> None:
    source, target = torch.arange(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    transfer = HostTransfer()
    transfer.begin()
    transfer.copy(target, source)
    transfer.finish()
    transfer.give_back()
    assert torch.equal(source, target)


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
