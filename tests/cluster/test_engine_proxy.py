"""tidemill.cluster.engine_proxy: what the public suites do not ask of an engine of several replicas."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.cluster.folder_parts import DEADLINES, Workers, pool

from tidemill.cluster.engine_proxy import EngineProxy
from tidemill.contracts.engine import Request, RolloutEngine, Sampling
from tidemill.contracts.events import Event, Progress, ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.state import PolicyVersion
from tidemill.engines.transformers.engine import TransformersEngine
from tidemill.errors import EngineError, Interrupted, ResidencyError, WeightSyncError, WorkerError
from tidemill.testing.suites.engine_case import close_asleep, open_awake, requests_of
from tidemill.testing.tiny import make_tiny_model

VERSION = PolicyVersion(1, 0)
SAMPLING = Sampling(max_new_tokens=6, seed=2)
PROMPTS = [[4 + row] * (1 + row * 7 % 11) for row in range(23)]

workers = pytest.fixture(scope="module")(pool)


@pytest.fixture
def two(workers: Callable[[str, int], Workers]) -> Iterator[Workers]:
    yield workers("engine", 2)
    workers("engine", 2).reuse()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", hidden=32, heads=2, kv_heads=1)


def ready(engine: RolloutEngine) -> RolloutEngine:
    open_awake(engine)
    engine.load_pretrained(VERSION)
    return engine


def inline(folder: Path, max_batch: int = 4) -> RolloutEngine:
    return ready(TransformersEngine(model=folder, device="cpu", dtype="float32", max_batch=max_batch, emit=ignore))


def test_one_replica_answers_with_the_bits_of_an_engine_in_this_process(
    workers: Callable[[str, int], Workers], folder: Path
) -> None:
    engine = ready(workers("engine", 1).engine(folder))
    requests = requests_of(PROMPTS)
    assert engine.generate(requests, SAMPLING) == inline(folder).generate(requests, SAMPLING)


def test_two_replicas_answer_with_the_tokens_of_one_and_always_with_the_same_bits(two: Workers, folder: Path) -> None:
    engine = ready(two.engine(folder))
    requests = requests_of(PROMPTS)
    answers = engine.generate(requests, SAMPLING)
    alone = inline(folder).generate(requests, SAMPLING)
    for mine, theirs in zip(answers, alone, strict=True):
        assert (mine.token_ids, mine.text, mine.version) == (theirs.token_ids, theirs.text, theirs.version)
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
    assert all(engine.generate(requests, SAMPLING) == answers for _ in range(3))


def test_a_slow_replica_takes_fewer_chunks_and_changes_no_answer(two: Workers, folder: Path) -> None:
    requests = requests_of(PROMPTS)
    even = ready(two.engine(folder)).generate(requests, SAMPLING)
    slow = ready(two.engine(folder, faults="engine-1/engine.generate=delay:0.6"))
    began = time.monotonic()
    assert slow.generate(requests, SAMPLING) == even
    assert time.monotonic() - began < 1.8


def test_progress_is_of_all_requests_and_reaches_the_end(two: Workers, folder: Path) -> None:
    engine = ready(two.engine(folder))
    engine.generate(requests_of(PROMPTS), SAMPLING)
    seen = [event for event in two.events if isinstance(event, Progress)]
    assert len(seen) >= 3
    assert [event.done for event in seen] == sorted(event.done for event in seen)
    assert {event.total for event in seen} == {len(PROMPTS)}
    assert seen[-1].done == len(PROMPTS)


def test_a_lone_replica_tells_how_far_it_is_while_it_works(
    workers: Callable[[str, int], Workers], folder: Path
) -> None:
    maker = workers("engine", 1)
    maker.events.clear()
    engine = ready(maker.engine(folder, max_batch=1))
    engine.generate(requests_of(PROMPTS * 1), Sampling(max_new_tokens=150))
    done = [event.done for event in maker.events if isinstance(event, Progress)]
    assert done[-1] == len(PROMPTS)
    assert any(0 < each < len(PROMPTS) for each in done)


def test_replicas_that_differ_are_told_apart_by_name(two: Workers, folder: Path) -> None:
    engine = ready(two.engine(folder))
    assert engine.weight_checksums() == inline(folder).weight_checksums()
    (folder / "worn-1").write_text("model.norm.weight")
    with pytest.raises(WeightSyncError, match=r"engine-0 and engine-1, \['model.norm.weight'\]"):
        engine.weight_checksums()


def test_an_update_that_fails_on_one_replica_leaves_the_version_unknown_until_a_whole_one(
    two: Workers, folder: Path
) -> None:
    for point in ("engine.publish", "engine.load_weights"):
        engine = two.engine(folder, faults=f"engine-1/{point}=raise@2")
        ready(engine)
        with pytest.raises(WorkerError, match="engine-1 on .* failed: FaultInjected"):
            engine.load_pretrained(PolicyVersion(1, 1))
        assert engine.version is None
        with pytest.raises(WeightSyncError, match="unknown"):
            engine.generate(requests_of(PROMPTS), SAMPLING)
        engine.load_pretrained(PolicyVersion(1, 1))
        assert engine.version == PolicyVersion(1, 1)
        assert {answer.version for answer in engine.generate(requests_of(PROMPTS), SAMPLING)} == {engine.version}


def test_a_replica_that_dies_while_it_answers_is_named_at_once(two: Workers, folder: Path) -> None:
    engine = ready(two.engine(folder, faults="engine-1/engine.generate=kill@2,engine-0/engine.generate=delay:9@2"))
    began = time.monotonic()
    with pytest.raises(WorkerError, match="engine-1 died"):
        engine.generate(requests_of(PROMPTS), SAMPLING)
    assert time.monotonic() - began < 5


def test_a_killed_replica_is_named_by_whatever_comes_next(two: Workers, folder: Path) -> None:
    engine = ready(two.engine(folder))
    os.kill(two.used[-1].pids[0], signal.SIGKILL)
    with pytest.raises(WorkerError, match="engine-0 died"):
        engine.weight_checksums()
    with pytest.raises(WorkerError, match="engine-0 died"):
        engine.generate(requests_of(PROMPTS), SAMPLING)


def test_a_replica_that_does_not_end_in_time_is_named_and_ended(two: Workers, folder: Path) -> None:
    hasty = type(DEADLINES)(work=1.0, transition=5.0)
    engine = ready(two.engine(folder, faults="engine-1/engine.generate=delay:60", deadlines=hasty))
    with pytest.raises(WorkerError, match=r"engine-1 did not generate within 1"):
        engine.generate(requests_of(PROMPTS), SAMPLING)


def test_a_request_that_cannot_be_answered_is_refused_as_inline_and_the_next_call_works(
    two: Workers, folder: Path
) -> None:
    engine = ready(two.engine(folder))
    bad = [*requests_of(PROMPTS), Request(key="long", token_ids=(5,) * 2045)]
    with pytest.raises(EngineError, match="cannot answer request long: 2045"):
        engine.generate(bad, SAMPLING)
    twice = [*requests_of(PROMPTS), *requests_of(PROMPTS[:1])]
    with pytest.raises(EngineError, match=r"one key 0:0#0"):
        engine.generate(twice, SAMPLING)
    assert len(engine.generate(requests_of(PROMPTS), SAMPLING)) == len(PROMPTS)


def test_an_interruption_leaves_answers_behind_that_nothing_later_takes_for_its_own(two: Workers, folder: Path) -> None:
    def interrupt(event: Event) -> None:
        if isinstance(event, Progress) and armed:
            armed.clear()
            raise Interrupted("stop")

    armed = [True]
    maker = two.engine(folder)
    engine = EngineProxy(maker.group, deadlines=DEADLINES, emit=interrupt, max_batch=4)
    ready(engine)
    with pytest.raises(Interrupted):
        engine.generate(requests_of(PROMPTS), SAMPLING)
    assert engine.generate(requests_of(PROMPTS), SAMPLING) == engine.generate(requests_of(PROMPTS), SAMPLING)
    armed.append(True)
    with pytest.raises(Interrupted):
        engine.generate(requests_of(PROMPTS), SAMPLING)
    close_asleep(engine)
    assert engine.resident() == Part.NONE


def test_sleep_waits_for_what_an_interruption_left_however_short_its_own_deadline(two: Workers, folder: Path) -> None:
    patient = type(DEADLINES)(work=30.0, transition=0.8)
    engine = ready(two.engine(folder, faults="engine-0/engine.generate=delay:2", deadlines=patient))

    def stop(number: int, frame: object) -> None:
        raise Interrupted("stop")

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Interrupted):
            engine.generate(requests_of(PROMPTS), SAMPLING)
    finally:
        signal.signal(signal.SIGALRM, before)
    engine.sleep()
    assert engine.version is None


def test_two_threads_at_once_are_refused_and_so_is_sleep(two: Workers, folder: Path) -> None:
    engine = ready(two.engine(folder, faults="engine-0/engine.generate=delay:1.5"))
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.extend(engine.generate(requests_of(PROMPTS), SAMPLING)))
    thread.start()
    time.sleep(0.4)
    with pytest.raises(ResidencyError, match="is generating"):
        engine.sleep()
    with pytest.raises(EngineError, match="another thread"):
        engine.generate(requests_of(PROMPTS), SAMPLING)
    thread.join(20)
    assert len(answers) == len(PROMPTS)
    engine.sleep()


def test_a_wake_that_fails_on_one_replica_forgets_the_weights_that_were_put_back_without_content(
    two: Workers, folder: Path
) -> None:
    engine = two.engine(folder)
    open_awake(engine, Part.WEIGHTS)
    engine.load_pretrained(VERSION)
    (folder / "full-1").touch()
    with pytest.raises(ResidencyError, match="no room for the cache"):
        engine.wake_up(Part.KV_CACHE)
    assert engine.version is None
    (folder / "full-1").unlink()
    open_awake(engine)
    with pytest.raises(WeightSyncError, match="unknown"):
        engine.generate(requests_of(PROMPTS), SAMPLING)
    ready(engine)
    assert len(engine.generate(requests_of(PROMPTS), SAMPLING)) == len(PROMPTS)


def test_weights_are_cast_to_the_engines_dtype_on_their_way(two: Workers, folder: Path) -> None:
    engine = two.engine(folder, dtype="bfloat16")
    assert engine.dtype == "bfloat16"
    ready(engine)
    pretrained = engine.weight_checksums()
    from safetensors.torch import load_file

    engine.begin_update()
    for item in load_file(folder / "model.safetensors").items():
        engine.load_weights([(item[0], item[1].to(torch.float64))])
    engine.publish(PolicyVersion(1, 1))
    assert engine.weight_checksums() == pretrained
