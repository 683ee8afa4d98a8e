"""A capture begun before it is needed (`HostArenaSaver.begin_capture`): the same bytes, or none of it counts."""

import threading
import time
from collections.abc import Sequence

import pytest
import torch
from tests.residency.savers.late import LateTransfer

from tidemill import faults
from tidemill.contracts.footprint import Part
from tidemill.residency.savers import host_arena
from tidemill.residency.savers.crossing import Captured
from tidemill.residency.savers.host_arena import HostArenaSaver


def saver_of(
    tensors: list[torch.Tensor], spare_bytes: int = 1 << 20, more: Sequence[torch.Tensor] = ()
) -> HostArenaSaver:
    saver = HostArenaSaver(device="cpu", page_bytes=1024, spare_bytes=spare_bytes, pin=False, deadline=5.0)
    for number, tensor in enumerate(tensors):
        saver.add(str(number), tensor, Part.WEIGHTS)
    for number, tensor in enumerate(more):
        saver.add(f"more {number}", tensor, Part.OPTIMIZER)
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


def left(saver: HostArenaSaver, key: int) -> tuple[list[int], Captured]:
    pieces, sizes = saver.leave(key), []
    while True:
        try:
            sizes.append(next(pieces))
        except StopIteration as end:
            return sizes, end.value


def test_leaving_with_what_was_begun_only_frees(tensors: list[torch.Tensor]) -> None:
    saver = saver_of(tensors)
    before, size, slabs = contents(tensors), saver.device_bytes(Part.ALL), len(saver._crossing.slabs)
    with faults.passed() as points:
        saver.begin_capture(1)
        sizes, captured = left(saver, 1)
    assert list(points).count("residency.capture.slab") == slabs == len(sizes)
    assert captured == Captured(beside=size) and saver.sealed_key == 1
    assert held(saver) == before
    saver.restore()
    assert contents(tensors) == before


def test_leaving_copies_what_came_back_after_the_beginning(tensors: list[torch.Tensor]) -> None:
    saver = saver_of(tensors[:7], more=tensors[7:])
    saver.capture(1)
    saver.release(1)
    saver.restore(Part.WEIGHTS)
    weights, all_of_it = (saver.device_bytes(part) for part in (Part.WEIGHTS, Part.ALL))
    saver.begin_capture(2)
    saver.restore()
    before = contents(tensors)
    assert left(saver, 2)[1] == Captured(copied=all_of_it - weights, beside=weights)
    assert held(saver) == before


def test_leaving_with_what_was_begun_waits_only_for_pages_that_are_still_read(tensors: list[torch.Tensor]) -> None:
    saver = saver_of(tensors, spare_bytes=0)
    saver.capture(1)
    snapshot = saver.snapshot()
    for name in snapshot.tensors.keys() - {"3"}:
        snapshot.written(name)
    for tensor in tensors:
        tensor.mul_(2.0)
    before = contents(tensors)
    saver.begin_capture(2)
    timer = threading.Timer(0.2, snapshot.release)
    timer.start()
    sizes, captured = left(saver, 2)
    timer.join()
    assert sum(sizes) == saver.device_bytes(Part.ALL) == captured.copied + captured.beside
    assert 0 < captured.copied <= 2 * 1024 and captured.waited > 0.1
    assert held(saver) == before


def test_leaving_frees_nothing_that_is_still_on_its_way_out(
    tensors: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = LateTransfer()
    monkeypatch.setattr(host_arena, "transfer_for", lambda device: transfer)
    saver = saver_of(tensors)
    transfer.seconds = 0.05
    before = contents(tensors)
    saver.begin_capture(1)
    began = time.monotonic()
    pieces = saver.leave(1)
    next(pieces)
    first = time.monotonic() - began
    for _ in pieces:
        pass
    assert first < (time.monotonic() - began) / 2
    assert held(saver) == before


def test_a_leave_with_what_was_begun_that_is_closed_is_undone_and_copied_anew_later(
    tensors: list[torch.Tensor],
) -> None:
    saver = saver_of(tensors)
    saver.begin_capture(1)
    pieces = saver.leave(1)
    next(pieces)
    pieces.close()
    assert saver.resident_part() == Part.WEIGHTS
    tensors[2].zero_()
    before = contents(tensors)
    assert left(saver, 2)[1].copied == saver.device_bytes(Part.ALL)
    assert held(saver) == before


def test_what_was_begun_is_complete_before_it_is_sealed(
    tensors: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = LateTransfer()
    monkeypatch.setattr(host_arena, "transfer_for", lambda device: transfer)
    saver = saver_of(tensors)
    transfer.seconds = 0.05
    saver.begin_capture(1)
    before = contents(tensors)
    saver.capture(1)
    assert held(saver) == before


def test_a_beginning_that_fails_leaves_the_capture_to_be_made_whole(tensors: list[torch.Tensor]) -> None:
    saver = saver_of(tensors)
    with faults.armed("residency.capture.slab=raise@3"), pytest.raises(faults.FaultInjected):
        saver.begin_capture(1)
    saver.capture(1)
    assert held(saver) == contents(tensors)
