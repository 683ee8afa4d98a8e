"""A capture begun before it is needed (`HostArenaSaver.begin_capture`): the same bytes, or none of it counts."""

import pytest
import torch

from tidemill import faults
from tidemill.contracts.footprint import Part
from tidemill.residency.savers.crossing import Captured
from tidemill.residency.savers.host_arena import HostArenaSaver


def saver_of(tensors: list[torch.Tensor], spare_bytes: int = 1 << 20) -> HostArenaSaver:
    saver = HostArenaSaver(device="cpu", page_bytes=1024, spare_bytes=spare_bytes, pin=False, deadline=5.0)
    for number, tensor in enumerate(tensors):
        saver.add(str(number), tensor, Part.WEIGHTS)
    saver.freeze()
    return saver


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    return [torch.randn(100 + 50 * n) for n in range(8)]


def held(saver: HostArenaSaver) -> list[bytes]:
    snapshot = saver.snapshot()
    try:
        return [bytes(tensor.data) for tensor in snapshot.tensors.values()]
    finally:
        snapshot.release()


def contents(tensors: list[torch.Tensor]) -> list[bytes]:
    return [bytes(tensor.clone().view(torch.uint8).tolist()) for tensor in tensors]


def test_what_was_begun_is_not_copied_again_and_holds_the_same_bytes(tensors: list[torch.Tensor]) -> None:
    saver = saver_of(tensors)
    saver.begin_capture(1)
    assert saver.sealed_key is None
    with faults.passed() as points:
        assert saver.capture(1) == Captured(beside=saver.device_bytes(Part.ALL))
    assert "residency.capture.slab" not in points
    assert held(saver) == contents(tensors)
    saver.begin_capture(1)
    assert saver.sealed_key == 1


def test_a_change_after_the_beginning_makes_it_worthless(tensors: list[torch.Tensor]) -> None:
    saver = saver_of(tensors)
    saver.begin_capture(1)
    for tensor in tensors:
        tensor.add_(1.0)
    saver.capture(2)
    assert held(saver) == contents(tensors)
    saver.begin_capture(3)
    saver.begin_capture(4)
    saver.capture(4)
    assert held(saver) == contents(tensors)


def test_a_snapshot_taken_before_it_never_changes(tensors: list[torch.Tensor]) -> None:
    saver = saver_of(tensors)
    saver.capture(1)
    before = contents(tensors)
    snapshot = saver.snapshot()
    for tensor in tensors:
        tensor.mul_(2.0)
    saver.begin_capture(2)
    assert [bytes(tensor.data) for tensor in snapshot.tensors.values()] == before
    saver.capture(2)
    assert [bytes(tensor.data) for tensor in snapshot.tensors.values()] == before
    snapshot.release()
    assert held(saver) == contents(tensors)


def test_leaving_and_loading_after_it_go_by_the_present_contents(tensors: list[torch.Tensor]) -> None:
    saver = saver_of(tensors)
    saver.capture(1)
    snapshot = saver.snapshot()
    saved = dict(snapshot.tensors)
    before = contents(tensors)
    tensors[0].zero_()
    saver.begin_capture(2)
    tensors[1].zero_()
    now = contents(tensors)
    for _ in saver.leave(3):
        pass
    saver.restore()
    assert contents(tensors) == now
    saver.begin_capture(4)
    saver.load(saved)
    assert contents(tensors) == before
    snapshot.release()


def test_a_beginning_that_fails_leaves_the_capture_to_be_made_whole(tensors: list[torch.Tensor]) -> None:
    saver = saver_of(tensors)
    with faults.armed("residency.capture.slab=raise@3"), pytest.raises(faults.FaultInjected):
        saver.begin_capture(1)
    saver.capture(1)
    assert held(saver) == contents(tensors)
