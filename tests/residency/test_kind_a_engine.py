"""Faults of kind A that are of the engine: A08 and A17, with the real engine under real leases, here and in workers."""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.residency.kind_a_pair import Pair, requests

from tidemill.cluster.engine_proxy import EngineProxy
from tidemill.cluster.engine_service import EngineService
from tidemill.cluster.tenant_proxy import Deadlines
from tidemill.contracts.engine import Completion, RolloutEngine, Sampling
from tidemill.contracts.events import Emit, Event, Progress, ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.workers import Place
from tidemill.engines.transformers.engine import TransformersEngine
from tidemill.errors import EngineError, ResidencyError, WeightSyncError
from tidemill.residency.manager import LeaseManager
from tidemill.testing.fakes.device import FakeTenant
from tidemill.testing.spawned import SpawnedGroup
from tidemill.testing.tiny import make_tiny_model

SHORT = Sampling(max_new_tokens=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, heads=2, kv_heads=2)


def build(folder: Path, place: Place, emit: Emit) -> RolloutEngine:
    torch.set_num_threads(1)
    return TransformersEngine(model=folder, device="cpu", dtype="float32", max_batch=4, kv_tokens=512, emit=emit)


@pytest.fixture(params=["here", "two-replicas"])
def engine(request: pytest.FixtureRequest, folder: Path, heard: list[Event]) -> Iterator[Any]:
    if request.param == "here":
        yield build(folder, Place(), heard.append)
        return
    group = SpawnedGroup("engine", 2)
    group.build(functools.partial(EngineService, functools.partial(build, folder)), meet=False)
    deadlines = Deadlines(work=30.0, transition=10.0)
    yield EngineProxy(group, deadlines=deadlines, emit=heard.append, max_batch=4)
    group.close()


@pytest.fixture
def heard() -> list[Event]:
    return []


# A08: deep sleep, then use


@pytest.mark.parametrize("parts", [[Part.ALL], [Part.WEIGHTS], [Part.KV_CACHE], [Part.WEIGHTS, Part.KV_CACHE]], ids=str)
def test_a08_an_engine_that_slept_generates_nothing_until_all_of_it_is_awake_and_its_weights_have_come(
    engine: Any, heard: list[Event], parts: list[Part]
) -> None:
    """A08: refused with a plain message, before a token is there, whichever parts were woken."""
    rival = FakeTenant("rival", {Part.WEIGHTS: 1}, keeps=Part.NONE)
    residency = LeaseManager(budget=engine.footprint(Part.ALL), emit=ignore, deadline=5.0)
    with residency.awake(engine):
        engine.load_pretrained(PolicyVersion(1, 0))
        answers = engine.generate(requests(4), SHORT)
    with residency.awake(rival):
        assert engine.footprint(engine.resident()) == 0
    assert engine.version is None
    heard.clear()
    for part in parts:
        with residency.awake(engine, part):
            with pytest.raises((ResidencyError, WeightSyncError), match=r"needs a lease|sync the weights first"):
                engine.generate(requests(4), SHORT)
            if Part.WEIGHTS not in part:
                with pytest.raises(ResidencyError, match="needs a lease"):
                    engine.load_pretrained(PolicyVersion(1, 1))
    with residency.awake(engine), pytest.raises(WeightSyncError, match="version .* unknown.*sync the weights first"):
        engine.generate(requests(4), SHORT)
    assert not [event for event in heard if isinstance(event, Progress)], "something was answered"
    with residency.awake(engine):
        engine.begin_update()
        with pytest.raises(WeightSyncError):
            engine.generate(requests(4), SHORT)
        engine.load_pretrained(PolicyVersion(1, 1))
        again = engine.generate(requests(4), SHORT)
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in answers]
    assert {answer.version for answer in again} == {PolicyVersion(1, 1)}


# A17: requests that arrive while it falls asleep


class Held:
    """An emit that stops the engine at its first answer until it may go on."""

    def __init__(self) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def __call__(self, event: Event) -> None:
        self.inside.set()
        assert self.go_on.wait(timeout=10)


def in_thread(work: Callable[[], list[Completion]]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def test_a17_requests_in_flight_end_before_the_engine_sleeps_and_those_that_come_then_are_refused_in_time(
    folder: Path,
) -> None:
    """A17: three in flight are answered, for whoever has a lease is not put to sleep; three more hang nowhere."""
    held = Held()
    pair = Pair(folder, hear=held, deadline=5.0)
    pair.step()
    held.inside.clear()
    held.go_on.clear()
    began = time.monotonic()
    first, answers = in_thread(lambda: pair.generate(3))
    assert held.inside.wait(timeout=10)
    training, trained = threading.Event(), threading.Event()

    def train() -> list[Completion]:
        with pair.residency.awake(pair.trainer):
            training.set()
            assert trained.wait(timeout=10)
        return []

    second, done = in_thread(train)
    assert not training.wait(timeout=0.2), "the engine was put to sleep under its requests"
    held.go_on.set()
    first.join(timeout=5)
    assert training.wait(timeout=5)
    assert pair.held(pair.engine) == 0
    assert len(answers[0]) == 3
    # It sleeps now, and somebody else has the device.
    third, late = in_thread(lambda: pair.generate(3))
    third.join(timeout=0.2)
    assert third.is_alive() and not late, "it waits for the device, which is in use, to a deadline"
    trained.set()
    third.join(timeout=5)
    second.join(timeout=5)
    assert isinstance(late[0], WeightSyncError) and "sync the weights first" in str(late[0])
    assert time.monotonic() - began < 5
    assert done == [[]]
    pair.step()
    assert len(pair.generate(3)) == 3


def test_a17_requests_that_find_the_device_taken_for_good_are_refused_at_the_deadline(folder: Path) -> None:
    """A17: bounded, with the reason."""
    pair = Pair(folder, deadline=0.3)
    pair.step()
    with pair.residency.awake(pair.trainer):
        began = time.monotonic()
        thread, found = in_thread(lambda: pair.generate(3))
        thread.join(timeout=5)
        assert time.monotonic() - began < 5
        assert isinstance(found[0], ResidencyError) and "trainer is in use and cannot sleep" in str(found[0])


def test_a17_requests_of_two_threads_and_a_sleep_at_once_are_refused_not_queued(folder: Path) -> None:
    """A17: an engine queues nothing, so nothing can wait in it for ever."""
    held = Held()
    pair = Pair(folder, hear=held)
    pair.step()
    held.inside.clear()
    held.go_on.clear()
    thread, answers = in_thread(lambda: pair.generate(3))
    assert held.inside.wait(timeout=10)
    with pair.residency.awake(pair.engine):
        with pytest.raises(EngineError, match="another thread"):
            pair.engine.generate(requests(3), SHORT)
        with pytest.raises(ResidencyError, match="is generating"):
            pair.engine.sleep()
    held.go_on.set()
    thread.join(timeout=5)
    assert len(answers[0]) == 3
