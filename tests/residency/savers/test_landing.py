"""Host pages into which a checkpoint is read (`tidemill.residency.savers.landing`)."""

import threading

import pytest
import torch

from tidemill.contracts.checkpoint import SavedTensor, TensorBytes
from tidemill.contracts.footprint import Part
from tidemill.contracts.landing import NOWHERE, Landable
from tidemill.errors import CheckpointError, ResidencyError
from tidemill.residency.savers.host_arena import HostArenaSaver
from tidemill.residency.savers.landing import Landed

NUMBERS = {"w": 40.0, "b": 7.0, "turned": 3.0}


class State:
    """Three tensors, one of which does not lie row-major; what is saved of them is all `NUMBERS`."""

    def __init__(self) -> None:
        self.tensors = {"w": torch.zeros(10, 4), "b": torch.zeros(3), "turned": torch.zeros(5, 2).t()}
        self.saver = HostArenaSaver(device="cpu", page_bytes=512, spare_bytes=4096, pin=False, deadline=10.0)
        for name, tensor in self.tensors.items():
            self.saver.add(name, tensor, Part.WEIGHTS)
        self.saver.freeze()
        self.saved = {
            name: torch.full(tensor.shape, NUMBERS[name]).numpy().tobytes() for name, tensor in self.tensors.items()
        }

    def stored(self, *readable: str) -> dict[str, SavedTensor]:
        """What can be read only where it is in `readable`."""
        return {
            name: TensorBytes(
                dtype="F32",
                shape=tuple(tensor.shape),
                data=memoryview(self.saved[name] if name in readable else b""),
            )
            for name, tensor in self.tensors.items()
        }

    def holds(self, numbers: dict[str, float]) -> bool:
        """Whether the device tensors do."""
        return all(set(tensor.flatten().tolist()) == {numbers[name]} for name, tensor in self.tensors.items())


ZERO = dict.fromkeys(NUMBERS, 0.0)


def test_what_has_landed_is_not_read_and_the_rest_is() -> None:
    state = State()
    landing = state.saver.landing()
    for name, data in state.saved.items():
        landing.land(name, 8, memoryview(data)[8:])
        landing.land(name, 0, memoryview(data)[:8])
    assert state.holds(ZERO)
    state.saver.load(state.stored("turned"), key=1, landing=landing)
    assert state.holds(NUMBERS) and state.saver.sealed_key == 1


def test_a_tensor_that_landed_in_part_is_read() -> None:
    state = State()
    landing = state.saver.landing()
    landing.land("w", 0, memoryview(bytes(156)))
    landing.land("b", 0, memoryview(state.saved["b"]))
    with pytest.raises(CheckpointError, match="cannot load 'w'"):
        state.saver.load(state.stored("turned"), landing=landing)
    assert state.holds(ZERO)
    state.saver.load(state.stored(*NUMBERS), landing=landing)
    assert state.holds(NUMBERS)


def test_what_is_unknown_or_too_long_does_not_land() -> None:
    state = State()
    landing = state.saver.landing()
    landing.land("ghost", 0, memoryview(b"abcd"))
    landing.land("b", 4, memoryview(bytes(12)))
    landing.land("w", 0, memoryview(state.saved["w"]))
    state.saver.load(state.stored("b", "turned"), landing=landing)
    assert state.holds(NUMBERS)


def test_pieces_of_a_tensor_do_not_land() -> None:
    tensor = torch.zeros(2, 4)
    saver = HostArenaSaver(device="cpu", page_bytes=512, pin=False)
    saver.add("w", tensor, Part.WEIGHTS, whole=(4, 4), offset=(2, 0))
    saver.freeze()
    landing = saver.landing()
    landing.land("w", 0, memoryview(torch.ones(2, 4).numpy()).cast("B"))
    mine = TensorBytes(dtype="F32", shape=(2, 4), data=memoryview(torch.full((2, 4), 2.0).numpy()).cast("B"))
    saver.load({"w": mine}, landing=landing)
    assert set(tensor.flatten().tolist()) == {2.0}


@pytest.mark.parametrize("between", ["capture", "begin", "another", "load", "sleep"])
def test_what_landed_is_worthless_once_the_pages_were_used_otherwise(between: str) -> None:
    state = State()
    landing = state.saver.landing()
    for name, data in state.saved.items():
        landing.land(name, 0, memoryview(bytes(len(data))))
    match between:
        case "capture":
            state.saver.capture(5)
        case "begin":
            state.saver.begin_capture(5)
        case "another":
            state.saver.landing()
        case "load":
            state.saver.load(state.stored(*NUMBERS))
        case "sleep":
            state.saver.capture(5)
            state.saver.release(5)
            state.saver.restore()
    landing.land("w", 0, memoryview(bytes(160)))
    state.saver.load(state.stored(*NUMBERS), key=2, landing=landing)
    assert state.holds(NUMBERS)
    snapshot = state.saver.snapshot()
    assert all(bytes(snapshot.tensors[name].data) == data for name, data in state.saved.items())


def test_pages_that_a_snapshot_holds_are_left_alone_by_what_lands() -> None:
    state = State()
    state.saver.capture(0)
    snapshot = state.saver.snapshot()
    landing = state.saver.landing()
    landing.land("w", 0, memoryview(state.saved["w"]))
    assert bytes(snapshot.tensors["w"].data) == bytes(160)
    snapshot.release()
    state.saver.load(state.stored("b", "turned"), landing=landing)
    assert state.holds(NUMBERS)


def test_who_closes_it_waits_for_what_is_being_written() -> None:
    state = State()
    inside, go_on, over = threading.Event(), threading.Event(), threading.Event()

    def run_of(slab: int) -> object:
        inside.set()
        assert go_on.wait(10)
        return state.saver._arena.run(slab)

    landing = Landed(state.saver.ledger, run_of)  # type: ignore[arg-type]
    writer = threading.Thread(target=landing.land, args=("w", 0, memoryview(state.saved["w"])))
    closer = threading.Thread(target=lambda: (landing.close(), over.set()))
    writer.start()
    assert inside.wait(10)
    closer.start()
    assert not over.wait(0.05)
    go_on.set()
    assert over.wait(10) and not landing.open
    writer.join()
    closer.join()


def test_nothing_lands_while_asleep_and_a_saver_is_landable() -> None:
    state = State()
    assert isinstance(state.saver, Landable)
    state.saver.capture(0)
    state.saver.release(0)
    with pytest.raises(ResidencyError, match="asleep"):
        state.saver.landing()
    state.saver.restore()
    assert state.saver.sealed_key == 0
    state.saver.load(state.stored(*NUMBERS), landing=NOWHERE)
    assert state.holds(NUMBERS)
