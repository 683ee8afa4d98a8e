"""A wake that returns while bytes are on their way (`tidemill.residency.savers.host_arena`)."""

import threading
import time
from typing import Any

import pytest
import torch
from tests.residency.savers.kinds import RESIZED, of_kind
from tests.residency.savers.late import LateTransfer

from tidemill import faults
from tidemill.contracts.footprint import Part
from tidemill.errors import ResidencyError
from tidemill.residency.savers import host_arena
from tidemill.residency.savers.host_arena import HostArenaSaver


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateTransfer:
    transfer = LateTransfer()
    monkeypatch.setattr(host_arena, "transfer_for", lambda device: transfer)
    return transfer


class State:
    """Six weights and a moment, a slab each; asleep."""

    def __init__(self) -> None:
        self.tensors = {f"w{i}": torch.full((128,), float(i)) for i in range(6)} | {"m": torch.full((128,), 9.0)}
        self.saver: HostArenaSaver = of_kind(RESIZED, page_bytes=512, spare_bytes=8 * 512)
        for name, tensor in self.tensors.items():
            self.saver.add(name, tensor, Part.OPTIMIZER if name == "m" else Part.WEIGHTS)
        self.saver.freeze()
        self.sleep(0)

    def sleep(self, key: int) -> None:
        self.saver.capture(key)
        self.saver.release(key)

    def seen(self) -> list[Any]:
        return [tensor[0].item() for tensor in self.tensors.values()]


WHOLE = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 9.0]


def test_what_is_waited_for_is_there_and_the_rest_is_not_waited_for(late: LateTransfer) -> None:
    state = State()
    late.seconds = 0.05
    began = time.monotonic()
    assert state.saver.restore(wait=False) == 7 * 512
    assert time.monotonic() - began < 0.04
    assert state.saver.resident_part() == Part.WEIGHTS | Part.OPTIMIZER
    state.saver.arrived(["w1"])
    assert state.seen()[:2] == WHOLE[:2] and state.seen()[5] != 5.0
    state.saver.arrived(state.tensors)
    assert state.seen() == WHOLE
    assert 0.3 < time.monotonic() - began < 3


def test_names_that_are_not_known_or_not_on_their_way_are_there(late: LateTransfer) -> None:
    state = State()
    state.saver.restore(wait=False)
    state.saver.arrived(["tied to another", "w0", "w0"])
    state.saver.restore(wait=False)
    assert state.seen()[0] == 0.0


@pytest.mark.parametrize("call", ["sleep", "load", "leave", "checksums", "part"])
def test_whatever_comes_next_waits_for_what_it_touches(late: LateTransfer, call: str) -> None:
    state = State()
    before = state.saver.checksums()
    late.seconds = 0.02
    state.saver.restore(wait=False)
    match call:
        case "sleep":
            state.sleep(1)
        case "load":
            state.saver.load(state.saver.snapshot().tensors)
        case "leave":
            for _ in state.saver.leave(1):
                pass
        case "part":
            state.sleep(0)
            state.saver.restore(Part.OPTIMIZER, wait=False)
    assert state.saver.checksums() == before
    state.saver.restore()
    assert state.seen() == WHOLE


def test_no_copy_is_under_way_before_there_is_room_for_all(late: LateTransfer) -> None:
    state = State()
    before = late.copies
    with faults.armed("residency.restore.slab=raise@7"), pytest.raises(ResidencyError, match="all is as before"):
        state.saver.restore(wait=False)
    assert late.copies == before
    state.saver.restore(wait=False)
    assert late.copies == before + 7


def test_a_wake_that_fails_while_copies_are_on_their_way_frees_all_of_it(late: LateTransfer) -> None:
    state = State()
    late.seconds = 0.02
    with faults.armed("residency.restore.slab=raise@5"), pytest.raises(ResidencyError, match="all is as before"):
        for _ in state.saver.arrive():
            pass
    assert state.saver.resident_part() == Part.NONE
    state.saver.restore(wait=False)
    state.saver.arrived(state.tensors)
    assert state.seen() == WHOLE


def test_several_threads_may_wait_for_the_same(late: LateTransfer) -> None:
    state = State()
    late.seconds = 0.02
    state.saver.restore(wait=False)
    found: list[list[float]] = []

    def look() -> None:
        state.saver.arrived(state.tensors)
        found.append(state.seen())

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == [WHOLE] * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_what_arrived_may_be_used_on_any_stream() -> None:
    saver = HostArenaSaver(device="cuda", page_bytes=8 << 20, pin=True)
    tensors = {f"w{i}": torch.full((1 << 22,), float(i), device="cuda") for i in range(20)}
    for name, tensor in tensors.items():
        saver.add(name, tensor, Part.WEIGHTS)
    saver.freeze()
    for key in range(3):
        saver.capture(key)
        saver.release(key)
        saver.restore(wait=False)
        for i, (name, tensor) in enumerate(tensors.items()):
            saver.arrived([name])
            with torch.cuda.stream(torch.cuda.Stream()):
                total = tensor.sum()
                torch.cuda.current_stream().synchronize()
            assert total.item() == i * (1 << 22)
    saver.close()
