"""`tidemill.residency.swap`: one tenant goes while another comes, and what becomes of both when it fails."""

from collections.abc import Callable, Generator

import pytest
from tests.residency.life_cycle_memory import SaverTenant, sound

from tidemill import faults
from tidemill.contracts.events import Event, PhaseDone, Transition, ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Moved, Swappable
from tidemill.errors import ResidencyError
from tidemill.residency.manager import LeaseManager
from tidemill.residency.swap import swap
from tidemill.testing.fakes.device import FakeTenant


class Device:
    """Counts bytes of all tenants on it; `most` is the most there ever was."""

    def __init__(self) -> None:
        self.held = self.most = 0
        self.log: list[str] = []

    def take(self, count: int) -> None:
        self.held += count
        self.most = max(self.most, self.held)


class Pieced(FakeTenant):
    """Moves its weights in `pieces`; `fails` is called with `leave` or `arrive` and the number of each piece."""

    def __init__(self, name: str, pieces: list[int], device: Device, *, awake: bool) -> None:
        super().__init__(name, {Part.WEIGHTS: sum(pieces)}, keeps=Part.ALL)
        self.pieces, self.on = pieces, device
        self.fails: Callable[[str, int], None] = lambda direction, piece: None
        if awake:
            self.awake = Part.WEIGHTS
            device.take(sum(pieces))

    def leave(self) -> Generator[int, None, Moved]:
        gone = []
        try:
            for number, size in enumerate(self.pieces):
                self.fails("leave", number)
                self.on.log.append(f"{self.name}-{number}")
                self.on.take(-size)
                gone.append(size)
                yield size
        except GeneratorExit:
            self.on.take(sum(gone))
            raise
        except BaseException:
            yield 0
            self.on.take(sum(gone))
            raise
        self.awake = Part.NONE
        return Moved(copied=sum(self.pieces), waited=0.5, left={"context": 3})

    def arrive(self, part: Part) -> Generator[int, None, Moved]:
        come = []
        try:
            for number, size in enumerate(self.pieces):
                yield size
                self.fails("arrive", number)
                self.on.log.append(f"{self.name}+{number}")
                self.on.take(size)
                come.append(size)
            yield 0
        except BaseException:
            self.on.take(-sum(come))
            raise
        self.awake = Part.WEIGHTS
        return Moved(copied=sum(self.pieces))


def pair(out: list[int], coming: list[int]) -> tuple[Device, Pieced, Pieced]:
    device = Device()
    return device, Pieced("trainer", out, device, awake=True), Pieced("reference", coming, device, awake=False)


def test_the_other_comes_while_the_first_goes_and_never_more_is_held_than_there_is_room() -> None:
    device, trainer, reference = pair([10, 10, 10], [10, 10, 5])
    moved = swap(trainer, reference, Part.WEIGHTS, room=10)
    assert moved == (Moved(copied=30, waited=0.5, left={"context": 3}), Moved(copied=25))
    assert device.log == ["reference+0", "trainer-0", "reference+1", "trainer-1", "reference+2", "trainer-2"]
    assert (device.held, device.most) == (25, 40)
    assert (trainer.resident(), reference.resident()) == (Part.NONE, Part.WEIGHTS)


def test_without_room_the_first_piece_waits_for_as_many_as_it_needs() -> None:
    device, trainer, reference = pair([4, 4, 4], [10, 2])
    swap(trainer, reference, Part.WEIGHTS, room=0)
    assert device.log == ["trainer-0", "trainer-1", "trainer-2", "reference+0", "reference+1"]
    assert device.most == 12


def test_a_larger_one_is_refused_and_the_first_sleeps_whole() -> None:
    device, trainer, reference = pair([4, 4], [5, 5])
    with pytest.raises(ResidencyError, match="a piece of 5 B has 3 B when all of trainer is gone"):
        swap(trainer, reference, Part.WEIGHTS, room=0)
    assert (trainer.resident(), reference.resident(), device.held) == (Part.NONE, Part.NONE, 0)


@pytest.mark.parametrize("piece", range(3))
@pytest.mark.parametrize("direction", ["leave", "arrive"])
def test_a_failure_of_any_piece_of_either_leaves_both_as_before(direction: str, piece: int) -> None:
    device, trainer, reference = pair([10, 10, 10], [10, 10, 10])

    def fail(way: str, number: int) -> None:
        if (way, number) == (direction, piece):
            raise MemoryError("full")

    trainer.fails = reference.fails = fail
    with pytest.raises(MemoryError):
        swap(trainer, reference, Part.WEIGHTS, room=10)
    assert (trainer.resident(), reference.resident(), device.held) == (Part.WEIGHTS, Part.NONE, 30)


@pytest.mark.parametrize("piece", range(3))
@pytest.mark.parametrize("direction", ["leave", "arrive"])
def test_a_failure_of_any_piece_takes_no_more_than_there_is_room_for(direction: str, piece: int) -> None:
    device, trainer, reference = pair([100, 100, 100], [100, 100, 100])

    def fail(way: str, number: int) -> None:
        if (way, number) == (direction, piece):
            raise RuntimeError("late")

    trainer.fails = reference.fails = fail
    with pytest.raises(RuntimeError, match="late"):
        swap(trainer, reference, Part.WEIGHTS, room=50)
    assert device.most <= 350
    assert (trainer.resident(), reference.resident(), device.held) == (Part.WEIGHTS, Part.NONE, 300)


class Liar(Pieced):
    """Says that it gives back what it keeps, all of it or but the first piece."""

    gives = 0

    def leave(self) -> Generator[int, None, Moved]:
        for number, size in enumerate(self.pieces):
            self.on.take(-size if number < self.gives else 0)
            yield size
        if self.gives:
            self.awake, self.sizes = Part.KV_CACHE, {Part.WEIGHTS: 30, Part.KV_CACHE: 20}
        return Moved()


@pytest.mark.parametrize("gives", [0, 1])
def test_a_tenant_that_frees_less_than_it_says_is_refused_and_who_came_goes_again(gives: int) -> None:
    device, _, reference = pair([], [10, 10, 10])
    liar = Liar("trainer", [10, 10, 10], device, awake=True)
    liar.gives = gives
    residency = LeaseManager(budget=35, emit=ignore, deadline=1.0)
    residency.admit(liar)
    with (
        pytest.raises(
            ResidencyError, match=r"trainer left, .* gave back 30 B of 30 B, and still holds .*offload=never"
        ),
        residency.awake(reference),
    ):
        raise AssertionError("a lease was granted")
    assert (reference.resident(), reference.gate.allowed) == (Part.NONE, Part.NONE)
    assert device.held == 30 - 10 * gives
    assert residency.transitions() == {"trainer": (0, 0), "reference": (0, 0)}


def test_one_that_comes_without_what_it_is_asked_for_is_not_granted() -> None:
    class Empty(Pieced):
        def arrive(self, part: Part) -> Generator[int, None, Moved]:
            yield 0
            return Moved()

    device, trainer, _ = pair([10, 10, 10], [])
    residency = LeaseManager(budget=40, emit=ignore, deadline=1.0)
    residency.admit(trainer)
    with (
        pytest.raises(ResidencyError, match="reference woke up and weights is not on the device"),
        residency.awake(Empty("reference", [20], device, awake=False)),
    ):
        raise AssertionError("a lease was granted")


def test_the_manager_swaps_two_that_can_and_tells_it_as_one_transition() -> None:
    device, trainer, reference = pair([10, 10, 10], [10, 10, 5])
    assert isinstance(trainer, Swappable)
    events: list[Event] = []
    residency = LeaseManager(budget=40, emit=events.append, deadline=1.0)
    residency.admit(trainer)
    with residency.awake(reference):
        assert reference.resident() == Part.WEIGHTS
        assert trainer.resident() == Part.NONE
    assert device.most == 40
    assert residency.transitions() == {"trainer": (1, 0), "reference": (0, 1)}
    (told,) = [event for event in events if isinstance(event, Transition)]
    assert told.what == "trainer.sleep and reference.wake_up(weights)"
    assert (told.copied, told.waited, told.left) == (55, 0.5, {"context": 3})
    assert [event.name for event in events if isinstance(event, PhaseDone)] == ["swap"]


def test_a_swap_that_fails_grants_nothing_and_the_next_one_works() -> None:
    _, trainer, reference = pair([10, 10, 10], [10, 10, 5])
    residency = LeaseManager(budget=40, emit=lambda event: None, deadline=1.0)
    residency.admit(trainer)

    def fail(way: str, number: int) -> None:
        raise MemoryError("full")

    reference.fails = fail
    with (
        pytest.raises(ResidencyError, match=r"could not put trainer to sleep and wake reference \(weights\)"),
        residency.awake(reference),
    ):
        pass
    assert (trainer.resident(), reference.resident()) == (Part.WEIGHTS, Part.NONE)
    reference.fails = lambda way, number: None
    with residency.awake(reference):
        pass
    assert residency.transitions() == {"trainer": (1, 0), "reference": (0, 1)}


def test_one_that_cannot_move_in_pieces_sleeps_first() -> None:
    _, trainer, _ = pair([10, 10, 10], [])
    engine = FakeTenant("engine", {Part.WEIGHTS: 20}, keeps=Part.NONE)
    events: list[Event] = []
    residency = LeaseManager(budget=40, emit=events.append, deadline=1.0)
    residency.admit(trainer)
    trainer.sleep = lambda: _asleep(trainer)  # type: ignore[method-assign]
    with residency.awake(engine):
        pass
    assert [event.name for event in events if isinstance(event, PhaseDone)] == ["sleep", "wake_up"]


def _asleep(tenant: Pieced) -> Moved:
    tenant.awake = Part.NONE
    return Moved()


@pytest.mark.parametrize("nth", range(1, 6))
def test_memory_that_fails_to_leave_comes_back_when_that_which_came_is_gone(nth: int) -> None:
    trainer, critic = SaverTenant("trainer", sound()), SaverTenant("critic", sound())
    trainer.wake_up(Part.ALL)
    right = trainer.contents()
    seen: list[int] = []
    with (
        faults.calling("residency.restore.slab", lambda: seen.append(trainer.device_bytes + critic.device_bytes)),
        faults.armed(f"residency.release.slab=raise@{nth}"),
        pytest.raises(faults.FaultInjected),
    ):
        swap(trainer, critic, Part.ALL, room=0)
    assert max(seen, default=0) < trainer.footprint(Part.ALL), "what was freed is taken twice"
    assert (trainer.resident(), critic.resident()) == (Part.WEIGHTS | Part.OPTIMIZER, Part.NONE)
    assert trainer.contents() == right
