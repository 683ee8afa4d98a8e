"""tidemill.cluster.replacing, tidemill.cluster.driver_parcels and tidemill.cluster.spreading: replicas that die.

What is expected is what the same engine answers when nobody dies.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.cluster.folder_parts import DEADLINES, Workers, pool

from tidemill.cluster.engine_proxy import EngineProxy
from tidemill.cluster.weight_shipping import ShippedWeightSync
from tidemill.contracts.engine import Completion, Sampling
from tidemill.contracts.events import Metrics, Notice, ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.state import PolicyVersion
from tidemill.errors import WorkerDiedError, WorkerError
from tidemill.residency.manager import LeaseManager
from tidemill.testing.suites.engine_case import close_asleep, open_awake, requests_of
from tidemill.testing.tiny import make_tiny_model

FIRST, SECOND = PolicyVersion(1, 0), PolicyVersion(1, 1)
SAMPLING = Sampling(max_new_tokens=6, seed=2)
REQUESTS = requests_of([[4 + row] * (1 + row * 7 % 11) for row in range(23)])

workers = pytest.fixture(scope="module")(pool)


@pytest.fixture
def two(workers: Callable[[str, int], Workers]) -> Iterator[Workers]:
    yield workers("engine", 2)
    workers("engine", 2).reuse()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", hidden=64, heads=2, kv_heads=1)


def ready(engine: EngineProxy) -> EngineProxy:
    open_awake(engine)
    engine.load_pretrained(FIRST)
    return engine


def kill(engine: EngineProxy, replica: int) -> None:
    pid = engine.group.pids[replica]  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGKILL)


def numbers(maker: Workers) -> dict[str, float]:
    events = [event for event in maker.events if isinstance(event, Metrics)]
    return {name: value for event in events for name, value in event.values.items()}


def told(maker: Workers) -> str:
    return "\n".join(event.text for event in maker.events if isinstance(event, Notice))


def undisturbed(maker: Workers, folder: Path) -> list[Completion]:
    return ready(maker.engine(folder)).generate(REQUESTS, SAMPLING)


@pytest.mark.parametrize("moment", [2, 3, 4])
def test_a_replica_that_dies_while_it_answers_changes_no_bit_of_any_answer(
    two: Workers, folder: Path, moment: int
) -> None:
    expected = undisturbed(two, folder)
    engine = ready(two.engine(folder, faults=f"engine-1/engine.generate=kill@{moment}", restarts=1))
    two.events.clear()
    assert [engine.generate(REQUESTS, SAMPLING) for _ in range(3)] == [expected] * 3
    lost = int(numbers(two)["engine/reissued"])
    assert lost in (3, 4) and numbers(two)["engine/restarted"] == 1.0
    assert "engine-1 died" in told(two) and f"its {lost} requests go to the 1 that are left" in told(two)
    assert "engine-1 was started again (1 of 1)" in told(two)


def test_one_that_was_started_again_answers_nothing_before_it_has_had_a_hand_over(two: Workers, folder: Path) -> None:
    expected = undisturbed(two, folder)
    engine = ready(two.engine(folder, restarts=2))
    kill(engine, 1)
    assert engine.generate(REQUESTS, SAMPLING) == expected
    assert engine.version == FIRST
    empty: Any = engine.group
    # It is there, awake as its sibling is, and holds no version.
    assert empty.call("describe", deadline=5)
    assert empty.pids[1] != 0
    assert engine.resident() == Part.WEIGHTS | Part.KV_CACHE
    # It would refuse: that nothing is raised says that nobody asked it.
    assert engine.generate(REQUESTS, SAMPLING) == expected
    with pytest.raises(WorkerDiedError, match="engine-0 died"):
        kill(engine, 0)
        engine.generate(REQUESTS, SAMPLING)


@pytest.mark.parametrize("way", ["shipped", "loaded", "pretrained"])
def test_the_next_hand_over_reaches_the_new_one_like_all_others(
    two: Workers, workers: Callable[[str, int], Workers], folder: Path, way: str
) -> None:
    engine = ready(two.engine(folder, faults="engine-1/engine.generate=kill@2", restarts=1))
    engine.generate(REQUESTS, SAMPLING)
    match way:
        case "shipped":
            trainer = workers("trainer", 1).trainer(folder)
            residency = LeaseManager(budget=1 << 40, emit=ignore, deadline=5.0)
            residency.admit(trainer)
            with residency.awake(trainer):
                trainer.begin("0.01")
                ShippedWeightSync(residency=residency, emit=ignore).update_weights(trainer, engine, SECOND)
            open_awake(engine)
        case "loaded":
            engine.begin_update()
            engine.load_weights(
                (name, weight + 0.01) for name, weight in load_file(folder / "model.safetensors").items()
            )
            engine.publish(SECOND)
        case "pretrained":
            engine.load_pretrained(SECOND)
    first, second = engine.replica_checksums().values()
    assert first == second
    answers = engine.generate(REQUESTS, SAMPLING)
    assert {answer.version for answer in answers} == {SECOND}
    # Both answer again: when the other dies there is one left.
    kill(engine, 0)
    with pytest.raises(WorkerDiedError, match="engine-0 died"):
        engine.generate(REQUESTS, SAMPLING)
    workers("trainer", 1).reuse()


def test_a_replica_that_dies_in_its_sleep_is_there_again_when_the_engine_wakes(two: Workers, folder: Path) -> None:
    expected = undisturbed(two, folder)
    engine = ready(two.engine(folder, restarts=5))
    close_asleep(engine)
    kill(engine, 0)
    open_awake(engine, Part.WEIGHTS)
    engine.load_pretrained(FIRST)
    # Between the weights' wake and the cache's.
    kill(engine, 1)
    open_awake(engine)
    assert engine.version == FIRST
    assert engine.generate(REQUESTS, SAMPLING) == expected
    # Both at once, in the trainer's phase: no weights are lost that were not given up.
    close_asleep(engine)
    kill(engine, 0)
    kill(engine, 1)
    assert ready(engine).generate(REQUESTS, SAMPLING) == expected
    assert told(two).count("was started again") == 4


def test_a_replica_that_dies_awake_is_there_again_when_the_engine_sleeps(two: Workers, folder: Path) -> None:
    engine = ready(two.engine(folder, restarts=1))
    kill(engine, 1)
    close_asleep(engine)
    assert engine.resident() == Part.NONE
    assert ready(engine).generate(REQUESTS, SAMPLING)


def test_a_replica_that_hangs_is_replaced_when_its_time_is_over(two: Workers, folder: Path) -> None:
    expected = undisturbed(two, folder)
    hasty = type(DEADLINES)(work=6.0, transition=20.0, control=5.0)
    engine = ready(two.engine(folder, faults="engine-1/engine.generate=delay:60", deadlines=hasty, restarts=1))
    began = time.monotonic()
    assert engine.generate(REQUESTS, SAMPLING) == expected
    assert time.monotonic() - began < 20
    assert "engine-1 did not generate within 6" in told(two)


def test_the_limit_is_of_the_whole_run_and_without_it_the_first_death_is_the_last(two: Workers, folder: Path) -> None:
    engine = ready(two.engine(folder, restarts=1))
    kill(engine, 1)
    engine.generate(REQUESTS, SAMPLING)
    engine.load_pretrained(SECOND)
    kill(engine, 1)
    with pytest.raises(WorkerDiedError, match="engine-1 died"):
        engine.generate(REQUESTS, SAMPLING)
    with pytest.raises(WorkerError):
        engine.wake_up(Part.ALL)
    never = ready(two.engine(folder))
    kill(never, 0)
    with pytest.raises(WorkerDiedError, match="engine-0 died"):
        never.generate(REQUESTS, SAMPLING)


def test_a_lone_replica_is_replaced_in_its_sleep_and_missed_while_it_answers(
    workers: Callable[[str, int], Workers], folder: Path
) -> None:
    one = workers("engine", 1)
    engine = ready(one.engine(folder, restarts=3))
    expected = engine.generate(REQUESTS, SAMPLING)
    close_asleep(engine)
    kill(engine, 0)
    assert ready(engine).generate(REQUESTS, SAMPLING) == expected
    kill(engine, 0)
    with pytest.raises(WorkerDiedError, match="engine-0 died"):
        engine.generate(REQUESTS, SAMPLING)
    one.reuse()
