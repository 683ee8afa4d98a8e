"""Leases under a budget (`tidemill.residency.manager`): who sleeps when, and what is refused."""

import math
import threading
from collections.abc import Callable

import pytest

from tidemill.contracts.events import Event, Memory, PhaseDone
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Moved, Residency, Tenant
from tidemill.errors import ResidencyError
from tidemill.planning.budget import NO_LIMIT
from tidemill.residency.manager import LeaseManager
from tidemill.testing.fakes.device import FakeTenant
from tidemill.testing.suites.tenant import TenantSuite

Moves = list[str]


class Logged(FakeTenant):
    """Notes its moves in one list for all; `fails` are moves at which it raises before it changes anything."""

    def __init__(self, name: str, sizes: dict[Part, int], moves: Moves) -> None:
        super().__init__(name, sizes, keeps=Part.ALL)
        self.log = moves
        self.fails: set[str] = set()
        self.during: Callable[[], None] = lambda: None

    def wake_up(self, part: Part) -> Moved:
        new = [mine for mine in self.sizes if mine in part and mine not in self.awake]
        if new:
            self.move(f"wake_up({', '.join(mine.words() for mine in new)})")
        return super().wake_up(part)

    def sleep(self) -> Moved:
        if self.awake:
            self.move("sleep")
        return super().sleep()

    def move(self, what: str) -> None:
        self.during()
        self.log.append(f"{self.name}.{what}")
        if what in self.fails:
            raise MemoryError("out of memory")


@pytest.fixture
def moves() -> Moves:
    return []


@pytest.fixture
def trainer(moves: Moves) -> Logged:
    return Logged("trainer", {Part.WEIGHTS: 100, Part.OPTIMIZER: 200}, moves)


@pytest.fixture
def engine(moves: Moves) -> Logged:
    return Logged("engine", {Part.WEIGHTS: 100, Part.KV_CACHE: 150}, moves)


def manager(budget: int, events: list[Event] | None = None, deadline: float = 5.0) -> LeaseManager:
    kept: list[Event] = [] if events is None else events
    return LeaseManager(budget=budget, emit=kept.append, deadline=deadline)


def one_step(residency: Residency, trainer: Tenant, engine: Tenant) -> None:
    """Generate; then train, save, look, and hand the weights over, each with a lease inside the trainer's."""
    with residency.awake(engine):
        pass
    with residency.awake(trainer):
        for _ in ("step", "save", "evaluate"):
            with residency.awake(trainer):
                pass
        with residency.awake(engine, Part.WEIGHTS):
            pass


class TestFakeTenant(TenantSuite):
    @pytest.fixture
    def tenant(self) -> Tenant:
        return FakeTenant("trainer", {Part.WEIGHTS: 100, Part.OPTIMIZER: 200}, keeps=Part.ALL)

    def use(self, tenant: Tenant, residency: Residency) -> None:
        tenant.gate.check(Part.WEIGHTS | Part.OPTIMIZER, "step")


def test_with_a_small_budget_one_sleep_and_one_wake_a_step_in_the_order_of_the_design(
    trainer: Logged, engine: Logged, moves: Moves
) -> None:
    residency = manager(400)
    one_step(residency, trainer, engine)
    for _ in range(5):
        moves.clear()
        one_step(residency, trainer, engine)
        assert moves == [
            "trainer.sleep",
            "engine.wake_up(kv cache)",
            "engine.sleep",
            "trainer.wake_up(weights, optimizer)",
            "engine.wake_up(weights)",
        ]
    assert residency.transitions() == {"engine": (6, 12), "trainer": (5, 6)}


def test_with_room_for_both_nothing_ever_sleeps(trainer: Logged, engine: Logged, moves: Moves) -> None:
    residency = manager(550)
    for _ in range(5):
        one_step(residency, trainer, engine)
    assert moves == ["engine.wake_up(weights, kv cache)", "trainer.wake_up(weights, optimizer)"]


@pytest.mark.parametrize("budget", [249, 299, 399])
def test_with_too_small_a_budget_the_step_is_refused_and_nothing_is_put_to_sleep_for_it(
    trainer: Logged, engine: Logged, budget: int
) -> None:
    residency = manager(budget)
    with pytest.raises(ResidencyError):
        one_step(residency, trainer, engine)
    assert trainer.footprint(trainer.resident()) + engine.footprint(engine.resident()) <= budget


def test_a_refusal_shows_the_ledger_and_what_to_do(trainer: Logged, engine: Logged, moves: Moves) -> None:
    residency = manager(399)
    with residency.awake(trainer), pytest.raises(ResidencyError) as caught, residency.awake(engine, Part.WEIGHTS):
        pass
    assert str(caught.value) == (
        "cannot wake engine (weights): it needs 100 B, 99 B is free, and trainer is in use and cannot sleep; the "
        "budget is 399 B and trainer holds 300 B (weights 100 B, optimizer 200 B): raise residency.budget, or make the "
        "trainer or the engine smaller; `tidemill plan` shows where the bytes go"
    )
    assert moves == ["trainer.wake_up(weights, optimizer)"]


def test_a_tenant_larger_than_the_budget_is_refused_before_anybody_sleeps_for_it(
    trainer: Logged, engine: Logged, moves: Moves
) -> None:
    residency = manager(299)
    with residency.awake(engine):
        pass
    with pytest.raises(ResidencyError, match="nothing else is awake that could sleep"), residency.awake(trainer):
        pass
    assert moves == ["engine.wake_up(weights, kv cache)"]


def test_the_one_that_was_used_longest_ago_sleeps_first(moves: Moves) -> None:
    tenants = [Logged(name, {Part.WEIGHTS: 100}, moves) for name in ("first", "second", "third", "asker")]
    residency = manager(300)
    for tenant in (*tenants[:3], tenants[0]):
        with residency.awake(tenant):
            pass
    with residency.awake(tenants[3]):
        pass
    assert moves[3:] == ["second.sleep", "asker.wake_up(weights)"]


def test_a_tenant_counts_from_its_admission_and_sleeps_for_others(
    trainer: Logged, engine: Logged, moves: Moves
) -> None:
    engine.wake_up(Part.ALL)
    residency = manager(400)
    residency.admit(engine)
    with residency.awake(trainer):
        pass
    assert moves[1:] == ["engine.sleep", "trainer.wake_up(weights, optimizer)"]


def test_gates_are_open_for_the_leased_part_only_and_shut_behind_the_last_lease(engine: Logged) -> None:
    residency = manager(1000)
    with residency.awake(engine):
        with residency.awake(engine, Part.WEIGHTS):
            pass
        engine.gate.check(Part.ALL, "generate")
    with residency.awake(engine, Part.WEIGHTS):
        engine.gate.check(Part.WEIGHTS, "load")
        with pytest.raises(ResidencyError):
            engine.gate.check(Part.KV_CACHE, "generate")
    with pytest.raises(ResidencyError):
        engine.gate.check(Part.WEIGHTS, "load")


def test_an_exception_inside_a_lease_leaves_the_tenant_awake_shut_and_evictable(
    trainer: Logged, engine: Logged, moves: Moves
) -> None:
    residency = manager(300)
    with pytest.raises(ZeroDivisionError), residency.awake(trainer):
        raise ZeroDivisionError
    assert trainer.resident() == Part.WEIGHTS | Part.OPTIMIZER
    assert trainer.gate.allowed == Part.NONE
    with residency.awake(engine):
        pass
    assert "trainer.sleep" in moves


# Transitions that fail


def test_a_wake_that_fails_grants_nothing_and_the_next_one_works(trainer: Logged) -> None:
    residency = manager(300)
    trainer.fails = {"wake_up(weights, optimizer)"}
    with (
        pytest.raises(ResidencyError, match=r"could not wake trainer .*out of memory") as caught,
        residency.awake(trainer),
    ):
        pytest.fail("the lease was granted")
    assert isinstance(caught.value.__cause__, MemoryError)
    assert trainer.gate.allowed == Part.NONE
    assert residency.transitions()["trainer"] == (0, 0)
    trainer.fails.clear()
    with residency.awake(trainer):
        trainer.gate.check(Part.WEIGHTS, "step")


def test_a_sleep_that_fails_leaves_the_tenant_awake_and_the_asker_refused(trainer: Logged, engine: Logged) -> None:
    residency = manager(300)
    with residency.awake(trainer):
        pass
    trainer.fails = {"sleep"}
    with pytest.raises(ResidencyError, match="could not put trainer to sleep"), residency.awake(engine):
        pass
    assert trainer.resident() == Part.WEIGHTS | Part.OPTIMIZER
    assert engine.resident() == Part.NONE
    with residency.awake(trainer):
        trainer.gate.check(Part.WEIGHTS, "step")


def test_a_sleep_that_frees_nothing_is_an_error_not_a_success(engine: Logged, moves: Moves) -> None:
    class Insomniac(Logged):
        def sleep(self) -> Moved:
            return Moved()

    residency = manager(300)
    with residency.awake(Insomniac("trainer", {Part.WEIGHTS: 300}, moves)):
        pass
    with pytest.raises(ResidencyError, match="still holds 300 B"), residency.awake(engine):
        pass
    assert engine.resident() == Part.NONE


@pytest.mark.parametrize("brought", [Part.NONE, Part.WEIGHTS], ids=["nothing", "half"])
def test_a_wake_that_brings_less_than_was_asked_for_is_an_error_not_a_lease(moves: Moves, brought: Part) -> None:
    class Lazy(Logged):
        def wake_up(self, part: Part) -> Moved:
            return super().wake_up(part & brought)

    trainer = Lazy("trainer", {Part.WEIGHTS: 100, Part.OPTIMIZER: 200}, moves)
    with (
        pytest.raises(ResidencyError, match="trainer woke up and .* is not on the device"),
        manager(300).awake(trainer),
    ):
        pytest.fail("the lease was granted")
    assert trainer.gate.allowed == Part.NONE


def test_two_tenants_of_one_name_are_refused(moves: Moves) -> None:
    residency = manager(300)
    with residency.awake(Logged("engine", {Part.WEIGHTS: 1}, moves)):
        pass
    other = Logged("engine", {Part.WEIGHTS: 1}, moves)
    with (
        pytest.raises(ResidencyError, match="another tenant of that name.*give each its own `name`"),
        residency.awake(other),
    ):
        pass


# Threads


def in_thread(work: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    return thread, errors


@pytest.mark.parametrize("deadline", [5.0, 1e12, math.inf])
def test_another_thread_waits_until_the_lease_in_its_way_ends(
    trainer: Logged, engine: Logged, moves: Moves, deadline: float
) -> None:
    residency = manager(300, deadline=deadline)
    waiting = threading.Event()

    def generate() -> None:
        waiting.set()
        with residency.awake(engine):
            pass

    with residency.awake(trainer):
        thread, errors = in_thread(generate)
        assert waiting.wait(timeout=10)
        thread.join(timeout=0.1)
        assert thread.is_alive()
        assert "trainer.sleep" not in moves
    thread.join(timeout=10)
    assert not errors
    assert moves[1:] == ["trainer.sleep", "engine.wake_up(weights, kv cache)"]


def test_another_thread_gives_up_at_the_deadline_and_names_the_holder(trainer: Logged, engine: Logged) -> None:
    residency = manager(300, deadline=0.05)

    def generate() -> None:
        with residency.awake(engine):
            pass

    with residency.awake(trainer):
        thread, errors = in_thread(generate)
        thread.join(timeout=10)
    (error,) = errors
    assert isinstance(error, ResidencyError)
    assert "trainer is in use and cannot sleep" in str(error) and "waited 50 ms" in str(error)


def test_a_thread_that_stands_in_its_own_way_is_refused_at_once(trainer: Logged, engine: Logged) -> None:
    residency = manager(300, deadline=60.0)
    with residency.awake(trainer), pytest.raises(ResidencyError), residency.awake(engine):
        pass


def test_a_thread_waits_to_the_deadline_for_a_transition_of_another(trainer: Logged, engine: Logged) -> None:
    residency = manager(1000, deadline=0.05)
    moving, done = threading.Event(), threading.Event()

    def slowly() -> None:
        moving.set()
        assert done.wait(timeout=10)

    trainer.during = slowly

    def train() -> None:
        with residency.awake(trainer):
            pass

    thread, errors = in_thread(train)
    assert moving.wait(timeout=10)
    with pytest.raises(ResidencyError, match=r"residency\.deadline"), residency.awake(engine):
        pass
    done.set()
    thread.join(timeout=10)
    assert not errors


def test_a_lease_of_the_same_tenant_is_shared_among_threads(engine: Logged) -> None:
    residency = manager(300)

    def generate() -> None:
        with residency.awake(engine):
            engine.gate.check(Part.WEIGHTS, "generate")

    with residency.awake(engine):
        thread, errors = in_thread(generate)
        thread.join(timeout=10)
        engine.gate.check(Part.WEIGHTS, "generate")
    assert not errors


def test_a_closed_manager_refuses_and_sends_waiting_threads_away(trainer: Logged, engine: Logged) -> None:
    residency = manager(300)

    def generate() -> None:
        with residency.awake(engine):
            pass

    with residency.awake(trainer):
        thread, errors = in_thread(generate)
        thread.join(timeout=0.05)
        residency.close()
        thread.join(timeout=10)
        assert "closing" in str(errors[0])
    residency.close()
    with pytest.raises(ResidencyError, match="closing"), residency.awake(trainer):
        pass


# Events


def test_every_transition_is_timed_and_followed_by_who_holds_what(trainer: Logged, engine: Logged) -> None:
    events: list[Event] = []
    residency = manager(300, events)
    with residency.awake(engine):
        pass
    with residency.awake(trainer):
        pass
    phases = [(e.owner, e.name) for e in events if isinstance(e, PhaseDone)]
    memory = [(e.what, dict(e.device), e.budget) for e in events if isinstance(e, Memory)]
    assert phases == [("engine", "wake_up"), ("engine", "sleep"), ("trainer", "wake_up")]
    assert memory == [
        ("engine.wake_up(weights, kv cache)", {"engine": 250}, 300),
        ("engine.sleep", {"engine": 0, "trainer": 0}, 300),
        ("trainer.wake_up(weights, optimizer)", {"engine": 0, "trainer": 300}, 300),
    ]


def test_no_limit_is_told_as_zero(trainer: Logged) -> None:
    events: list[Event] = []
    with manager(NO_LIMIT, events).awake(trainer):
        pass
    assert [e.budget for e in events if isinstance(e, Memory)] == [0]


def test_a_lease_of_what_is_awake_tells_nothing(trainer: Logged) -> None:
    events: list[Event] = []
    residency = manager(1000, events)
    for _ in range(3):
        with residency.awake(trainer):
            pass
    assert len(events) == 3
