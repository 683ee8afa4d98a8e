"""Sleep and wake piece by piece (`tidemill.residency.savers.pieces`), as Swappable says."""

import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from tests.residency.savers.kinds import KINDS, Kind, of_kind

from tidemill import faults
from tidemill.contracts.footprint import Part
from tidemill.errors import ResidencyError
from tidemill.residency.savers.crossing import Captured

SIZE = 512
BOTH = Part.WEIGHTS | Part.OPTIMIZER


class State:
    """Ten tensors of a slab each, six of them weights."""

    def __init__(self, kind: Kind, **changes: Any) -> None:
        self.tensors = {f"t{i}": torch.full((SIZE // 4,), float(i), device=kind.device) for i in range(10)}
        self.saver = of_kind(kind, page_bytes=SIZE, **changes)
        for i, (name, tensor) in enumerate(self.tensors.items()):
            self.saver.add(name, tensor, Part.WEIGHTS if i < 6 else Part.OPTIMIZER)
        self.saver.freeze()
        self.version = 0

    def step(self) -> None:
        self.version += 1
        for tensor in self.tensors.values():
            tensor.add_(1.0)

    def is_whole(self) -> bool:
        wanted = [float(i + self.version) for i in range(10)]
        return [set(tensor.tolist()) for tensor in self.tensors.values()] == [{value} for value in wanted]

    def awake(self) -> int:
        return len(self.saver._crossing.awake())


@pytest.fixture(params=KINDS)
def state(request: pytest.FixtureRequest) -> State:
    return State(request.param)


def drained(pieces: Generator[int, None, Any]) -> tuple[list[int], Any]:
    seen = []
    while True:
        try:
            seen.append(next(pieces))
        except StopIteration as end:
            return seen, end.value


def test_leaving_gives_slab_after_slab_back_and_seals_at_the_end(state: State) -> None:
    state.step()
    pieces = state.saver.leave(1)
    assert [next(pieces) for _ in range(3)] == [SIZE] * 3
    assert (state.awake(), state.saver.sealed_key) == (7, None)
    assert drained(pieces) == ([SIZE] * 7, Captured(copied=10 * SIZE))
    assert (state.awake(), state.saver.sealed_key) == (0, 1)
    state.saver.restore()
    assert state.is_whole()


def test_arriving_asks_before_it_takes_and_says_when_all_is_on_its_way(state: State) -> None:
    state.step()
    drained(state.saver.leave(1))
    pieces = state.saver.arrive(Part.WEIGHTS)
    assert next(pieces) == SIZE and state.awake() == 0
    assert next(pieces) == SIZE and state.awake() == 1
    assert drained(pieces) == ([SIZE] * 4 + [0], 6 * SIZE)
    assert state.saver.resident_part() == Part.WEIGHTS
    assert drained(state.saver.arrive())[0] == [SIZE] * 4 + [0]
    assert state.is_whole()
    assert drained(state.saver.arrive()) == ([0], 0)


def test_what_is_sealed_leaves_without_a_copy(state: State) -> None:
    state.saver.capture(0)
    with faults.passed() as points:
        assert drained(state.saver.leave(0)) == ([SIZE] * 10, Captured())
    assert "residency.capture.slab" not in points
    state.saver.restore()
    assert state.is_whole()


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("after", [1, 4, 10])
def test_a_leave_that_is_closed_half_way_brings_back_what_is_gone(state: State, after: int, sealed: bool) -> None:
    state.step()
    if sealed:
        state.saver.capture(1)
    pieces = state.saver.leave(1)
    for _ in range(after):
        next(pieces)
    pieces.close()
    assert state.saver.resident_part() == BOTH and state.is_whole()
    assert state.saver.sealed_key == (1 if sealed else None)
    drained(state.saver.leave(1))
    state.saver.restore()
    assert state.is_whole()


def test_a_leave_that_fails_waits_before_it_takes_anything_back(state: State) -> None:
    pieces = state.saver.leave(0)
    with faults.armed("residency.release.slab=raise@3"):
        assert [next(pieces) for _ in range(3)] == [SIZE, SIZE, 0]
    assert state.awake() == 8
    with pytest.raises(faults.FaultInjected):
        next(pieces)
    assert state.saver.resident_part() == BOTH and state.is_whole()


def test_a_leave_that_has_failed_is_undone_when_it_is_closed_too(state: State) -> None:
    pieces = state.saver.leave(0)
    with faults.armed("residency.release.slab=raise@3"):
        assert [next(pieces) for _ in range(3)][-1] == 0
    pieces.close()
    assert state.saver.resident_part() == BOTH and state.is_whole()


def test_what_is_thrown_into_a_leave_comes_out_of_it(state: State) -> None:
    pieces = state.saver.leave(0)
    next(pieces)
    assert pieces.throw(KeyError("stop")) == 0
    with pytest.raises(KeyError):
        next(pieces)
    assert state.saver.resident_part() == BOTH and state.is_whole()


@pytest.mark.parametrize("point", ["capture", "release"])
@pytest.mark.parametrize("nth", [1, 6, 10])
def test_a_leave_that_fails_is_undone(state: State, point: str, nth: int) -> None:
    state.step()
    with faults.armed(f"residency.{point}.slab=raise@{nth}"), pytest.raises(faults.FaultInjected):
        drained(state.saver.leave(1))
    assert state.saver.resident_part() == BOTH and state.is_whole()
    assert state.saver.sealed_key is None


@pytest.mark.parametrize("sealed", [False, True])
def test_when_what_left_cannot_come_back_the_rest_follows_and_nothing_is_lost(state: State, sealed: bool) -> None:
    state.step()
    if sealed:
        state.saver.capture(1)
    pieces = state.saver.leave(1)
    for _ in range(4):
        next(pieces)
    with faults.armed("residency.restore.slab=raise@3"), pytest.raises(KeyError) as caught:
        pieces.throw(KeyError("stop"))
        next(pieces)
    assert "all is asleep now, with nothing lost" in caught.value.__notes__[0]
    assert (state.awake(), state.saver.sealed_key) == (0, 1)
    state.saver.restore()
    assert state.is_whole()


class Stranded:
    """Six weights of ten slabs asleep, or fewer; t3 could not leave, as it is read, and no other could come back."""

    def __init__(self, kind: Kind) -> None:
        self.state = State(kind, spare_bytes=0, deadline=0.05)
        self.saver = self.state.saver
        self.saver.capture(0)
        self.held = self.saver.snapshot()
        for name in self.held.tensors.keys() - {"t3"}:
            self.held.written(name)
        self.state.step()
        with faults.armed("residency.restore.slab=raise@2"), pytest.raises(ResidencyError) as caught:
            drained(self.saver.leave(1))
        self.cause = caught.value


def test_what_can_neither_leave_nor_let_the_rest_return_is_told_of_and_counted(state: State) -> None:
    run = Stranded(state_kind(state))
    assert "still read by the snapshot of version 0" in str(run.cause)
    (note,) = run.cause.__notes__
    assert "cannot come back (fault injected" in note and "nor can the rest follow" in note
    assert "512 B stay on the device" in note and "nothing lost" in note
    assert run.saver._crossing.awake() == [3]
    assert (run.saver.resident_part(), run.saver.sealed_key) == (Part.NONE, None)
    assert run.saver.device_bytes(Part.NONE) == SIZE
    assert run.saver.device_bytes(Part.WEIGHTS) == 6 * SIZE
    assert run.saver.device_bytes(Part.OPTIMIZER) == 4 * SIZE + SIZE
    assert run.saver.device_bytes(BOTH) == 10 * SIZE and run.saver.device_bytes(Part.KV_CACHE) == 0
    assert bytes(run.held.tensors["t3"].data) == torch.full((SIZE // 4,), 3.0).numpy().tobytes()


@pytest.mark.parametrize("then", ["restore", "arrive", "part", "leave", "sleep"])
def test_what_stayed_half_asleep_wakes_or_goes_on_sleeping_with_nothing_lost(state: State, then: str) -> None:
    run = Stranded(state_kind(state))
    match then:
        case "restore":
            assert run.saver.restore() == 9 * SIZE
        case "arrive":
            assert drained(run.saver.arrive())[1] == 9 * SIZE
        case "part":
            run.saver.restore(Part.OPTIMIZER)
            assert run.saver.device_bytes(run.saver.resident_part()) == 5 * SIZE
        case "leave":
            run.held.release()
            assert drained(run.saver.leave(1)) == ([SIZE], Captured(copied=SIZE))
        case "sleep":
            run.held.release()
            run.saver.capture(1)
            run.saver.release(1)
    if then in ("leave", "sleep"):
        assert (run.saver.device_bytes(Part.NONE), run.saver.sealed_key) == (0, 1)
    run.saver.restore()
    assert run.saver.resident_part() == BOTH and run.state.is_whole()


def test_a_release_of_which_some_can_neither_go_nor_return_says_so(state: State) -> None:
    state.step()
    state.saver.capture(1)
    freed = iter(range(2))

    def no_more() -> None:
        if next(freed, None) is None:
            raise RuntimeError("busy")

    with (
        faults.calling("residency.release.slab", no_more),
        faults.armed("residency.restore.slab=raise"),
        pytest.raises(
            ResidencyError, match=r"\(busy\); .*nor can the rest follow \(busy\): 4\.0 KiB stay on the device"
        ),
    ):
        state.saver.release(1)
    assert (state.saver.resident_part(), state.saver.device_bytes(Part.OPTIMIZER)) == (Part.OPTIMIZER, 8 * SIZE)
    state.saver.release(1)
    state.saver.restore()
    assert state.is_whole()


@pytest.mark.parametrize("after", [1, 3, 11])
def test_an_arrival_that_is_closed_half_way_frees_what_it_took(state: State, after: int) -> None:
    state.step()
    drained(state.saver.leave(1))
    state.saver.restore(Part.OPTIMIZER)
    pieces = state.saver.arrive()
    for _ in range(min(after, 7)):
        next(pieces)
    pieces.close()
    assert state.saver.resident_part() == Part.OPTIMIZER
    state.saver.restore()
    assert state.is_whole()


@pytest.mark.parametrize("nth", [1, 5, 10])
def test_an_arrival_that_fails_frees_what_it_took_and_says_so(state: State, nth: int) -> None:
    drained(state.saver.leave(0))
    with (
        faults.armed(f"residency.restore.slab=raise@{nth}"),
        pytest.raises(ResidencyError, match="all is as before"),
    ):
        drained(state.saver.arrive())
    assert state.awake() == 0
    state.saver.restore()
    assert state.is_whole()


def calls(state: State) -> dict[str, Callable[[], object]]:
    return {
        "capture": lambda: state.saver.capture(1),
        "restore": state.saver.restore,
        "release": lambda: state.saver.release(0),
        "leave": lambda: drained(state.saver.leave(1)),
        "arrive": lambda: drained(state.saver.arrive()),
    }


@pytest.mark.parametrize("call", ["capture", "restore", "release", "leave", "arrive"])
def test_while_something_is_half_done_other_transitions_are_refused(state: State, call: str) -> None:
    pieces = state.saver.leave(0)
    next(pieces)
    with pytest.raises(ResidencyError, match="'leave' is half done"):
        calls(state)[call]()
    pieces.close()
    assert state.is_whole()


def test_slabs_that_are_read_leave_last_when_their_reader_lets_go(state: State) -> None:
    run = State(state_kind(state), spare_bytes=0)
    run.saver.capture(0)
    held = run.saver.snapshot()
    for name in ("t0", "t1"):
        run.tensors[name].add_(1.0)
    for name in held.tensors.keys() - {"t0", "t5"}:
        held.written(name)
    pieces = run.saver.leave(1)
    assert [next(pieces) for _ in range(8)] == [SIZE] * 8
    assert run.saver._crossing.awake() == [0, 5]
    timer = threading.Timer(0.1, held.release)
    timer.start()
    seen, captured = drained(pieces)
    timer.join()
    assert seen == [SIZE] * 2 and captured.copied == 10 * SIZE and 0.05 < captured.waited < 5
    run.saver.restore()
    assert set(run.tensors["t0"].tolist()) == {1.0} and set(run.tensors["t5"].tolist()) == {5.0}


def test_a_leave_that_waits_too_long_for_a_reader_is_undone(state: State) -> None:
    run = State(state_kind(state), spare_bytes=0, deadline=0.05)
    run.saver.capture(0)
    held = run.saver.snapshot()
    for name in held.tensors.keys() - {"t3"}:
        held.written(name)
    run.step()
    with pytest.raises(ResidencyError, match="snapshot of version 0"):
        drained(run.saver.leave(1))
    assert run.saver.resident_part() == BOTH and run.is_whole()
    assert bytes(held.tensors["t3"].data) == torch.full((SIZE // 4,), 3.0).numpy().tobytes()


def state_kind(state: State) -> Kind:
    memory = type(state.saver._crossing.slabs[0].memory)
    return Kind(memory.__name__, memory, next(iter(state.tensors.values())).device.type)
