import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tidemill.contracts.batch import Batch, StepReport
from tidemill.contracts.checkpoint import Saved
from tidemill.contracts.events import Event, Memory, Metrics, Notice, PhaseDone, Transition
from tidemill.errors import CheckpointError, Interrupted, RecorderError
from tidemill.recorders.fanout import Fanout
from tidemill.recorders.jsonl import JsonlSink
from tidemill.testing.suites.recorder import scored_group

BATCH = Batch(
    token_ids=np.arange(4),
    offsets=np.array([0, 4]),
    loss_mask=np.ones(4, dtype=np.bool_),
    logprobs=np.zeros(4, dtype=np.float32),
    advantages=np.zeros(4, dtype=np.float32),
    metrics={"advantage/abs_mean": 0.5},
)
REPORT = StepReport(metrics={"policy/loss": 0.25}, logprobs=np.zeros(0, np.float32))


class ListSink:
    """Keeps what it is told."""

    def __init__(self, name: str = "list") -> None:
        self.name = name
        self.told: list[tuple[Any, ...]] = []

    def write(self, step: int, event: Event) -> None:
        self.told.append((step, event))

    def flush(self) -> None:
        pass

    def end_step(self, step: int) -> None:
        self.told.append((step, "end"))

    def state(self) -> Mapping[str, Any]:
        return {"told": len(self.told)}

    def resume(self, step: int, state: Mapping[str, Any]) -> None:
        self.told.append((step, "resume", dict(state)))

    def close(self) -> None:
        self.told.append((-1, "closed"))

    def events(self, kind: type) -> list[Any]:
        return [item[1] for item in self.told if isinstance(item[1], kind)]


class FailingSink(ListSink):
    """Fails at the n-th write, and when closed."""

    def __init__(self, name: str, nth: int, error: Exception) -> None:
        super().__init__(name)
        self.nth, self.error = nth, error

    def write(self, step: int, event: Event) -> None:
        self.nth -= 1
        if self.nth <= 0:
            raise self.error

    def close(self) -> None:
        raise OSError("cannot close either")


class Clock:
    """Moves when told to; both wall clock and timer."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def phase(self, name: str, seconds: float) -> PhaseDone:
        start, self.now = self.now, self.now + seconds
        return PhaseDone(name=name, start=start, seconds=seconds)


def test_numbers_are_written_before_the_checkpoint_and_timings_when_the_step_ends() -> None:
    sink, clock = ListSink(), Clock()
    recorder = Fanout(sinks=[sink], clock=clock, timer=clock)
    recorder.start(0)
    with recorder.step(0) as record:
        recorder.emit(clock.phase("generate", 2.0))
        recorder.emit(clock.phase("generate", 1.0))
        clock.now += 0.5
        record(groups=[scored_group("q", (1.0, 0.0))], batch=BATCH, report=REPORT)
        recorder.snapshot()  # a checkpoint finds the numbers written
        before = sink.events(Metrics)
    assert len(before) == 1
    assert before[0].values["reward/mean"] == 0.5
    assert before[0].values["policy/loss"] == 0.25
    assert before[0].values["batch/tokens"] == 4
    timing = sink.events(Metrics)[1].values
    assert timing == pytest.approx({"time/generate": 3.0, "time/step": 3.5, "time/other": 0.5})
    assert sink.told[-1] == (0, "end")


def test_a_supervised_step_has_no_rollout_numbers() -> None:
    sink = ListSink()
    recorder = Fanout(sinks=[sink])
    recorder.start(0)
    with recorder.step(0) as record:
        record(groups=(), batch=BATCH, report=REPORT)
    assert not any(name.startswith("reward/") for name in sink.events(Metrics)[0].values)


def test_a_skipped_update_is_told() -> None:
    sink = ListSink()
    recorder = Fanout(sinks=[sink])
    recorder.start(0)
    with recorder.step(7) as record:
        record(
            groups=(),
            batch=BATCH,
            report=StepReport(metrics={}, logprobs=BATCH.logprobs, skipped="the gradient is not finite"),
        )
    assert [n.text for n in sink.events(Notice)] == ["step 7 changed no weight: the gradient is not finite"]


def test_memory_of_a_step_is_its_peak_and_starts_with_what_was_held_before() -> None:
    sink = ListSink()
    recorder = Fanout(sinks=[sink])
    recorder.start(0)

    def held(trainer: int, host: int) -> Memory:
        return Memory(time=0.0, what="x", device={"trainer": trainer}, host={"trainer": host}, budget=9)

    recorder.emit(held(5, 0))
    with recorder.step(0):
        recorder.emit(held(0, 5))
        recorder.emit(held(3, 5))
    with recorder.step(1):
        pass
    first, second = (m.values for m in sink.events(Metrics))
    assert (first["memory/device/trainer"], first["memory/host/trainer"]) == (5, 5)
    assert (second["memory/device/trainer"], second["memory/host/trainer"]) == (3, 5)


def test_what_transitions_of_a_step_moved_and_left_are_its_metrics() -> None:
    sink = ListSink()
    recorder = Fanout(sinks=[sink])
    recorder.start(0)

    def moved(what: str, copied: int, left: int, beside: int = 0) -> Transition:
        return Transition(
            what=what,
            owner="trainer",
            start=0.0,
            seconds=0.5,
            copied=copied,
            beside=beside,
            waited=0.25,
            left={"context": left},
        )

    with recorder.step(0):
        recorder.emit(moved("trainer.sleep", 10**9, 7))
        recorder.emit(moved("trainer.wake_up(all)", 2 * 10**9, 5))
        recorder.emit(moved("engine.wake_up(kv cache)", 0, 5))
    with recorder.step(1):
        recorder.emit(moved("trainer.wake_up(all)", 0, 5, beside=4 * 10**9))
    with recorder.step(2):
        recorder.emit(moved("trainer.sleep", 10**9, 5, beside=10**9))
        recorder.emit(moved("trainer.wake_up(all)", 0, 5, beside=2 * 10**9))
    with recorder.step(3):
        pass
    first, second, third, fourth = (m.values for m in sink.events(Metrics))
    assert (first["memory/copied"], first["memory/gbps"], first["memory/left/context"]) == (3e9, 3.0, 7)
    assert first["time/wait_for_save"] == 0.75
    assert second["memory/copied"] == 4e9
    assert "memory/gbps" not in second, "nothing crossed within it"
    assert (third["memory/copied"], third["memory/gbps"]) == (4e9, 2.0)
    assert not [name for name in fourth if name.startswith(("memory/copied", "memory/gbps", "memory/left"))]


def test_a_step_left_by_an_exception_has_no_timings_and_the_next_one_its_own() -> None:
    sink, clock = ListSink(), Clock()
    recorder = Fanout(sinks=[sink], clock=clock, timer=clock)
    recorder.start(0)
    with pytest.raises(RuntimeError, match="boom"), recorder.step(0):
        recorder.emit(clock.phase("generate", 2.0))
        raise RuntimeError("boom")
    assert not sink.events(Metrics)
    with recorder.step(0):
        recorder.emit(clock.phase("train", 1.0))
    assert sink.events(Metrics)[0].values == pytest.approx({"time/train": 1.0, "time/step": 1.0, "time/other": 0.0})


def test_background_work_does_not_count_as_the_loops_time() -> None:
    sink, clock = ListSink(), Clock()
    recorder = Fanout(sinks=[sink], clock=clock, timer=clock)
    recorder.start(0)
    with recorder.step(0):
        event = clock.phase("save_durable", 3.0)
        writer = threading.Thread(target=recorder.emit, args=(event,))
        writer.start()
        writer.join()
    values = sink.events(Metrics)[0].values
    assert values["time/save_durable"] == 3.0
    assert values["time/other"] == 3.0


def test_events_carry_the_step_and_after_the_last_block_the_next_one() -> None:
    sink = ListSink()
    recorder = Fanout(sinks=[sink])
    recorder.start(4)
    recorder.emit(Notice(text="before"))
    with recorder.step(4):
        recorder.emit(Notice(text="within"))
    recorder.emit(Notice(text="after"))
    notices = [(item[0], item[1].text) for item in sink.told if isinstance(item[1], Notice)]
    assert notices == [(4, "before"), (4, "within"), (5, "after")]


def test_what_happens_before_the_start_waits_for_the_step_but_a_console_shows_it_at_once() -> None:
    sink, console = ListSink("file"), ListSink("console")
    recorder = Fanout(sinks=[sink], live=[console])
    recorder.emit(Notice(text="loading"))
    assert console.events(Notice)
    assert not sink.told
    recorder.start(30)
    assert sink.told == [(30, "resume", {}), (30, Notice(text="loading"))]
    assert len(console.events(Notice)) == 1


def test_a_sink_that_fails_is_dropped_with_a_notice_to_the_others() -> None:
    good = ListSink("good")
    recorder = Fanout(sinks=[FailingSink("bad", 2, OSError("no space left")), good])
    recorder.start(0)
    for text in "abc":
        recorder.emit(Notice(text=text))
    texts = [notice.text for notice in good.events(Notice)]
    assert texts[:2] == ["a", texts[1]]
    dropped = next(text for text in texts if "dropped" in text)
    assert "bad" in dropped and "OSError: no space left" in dropped and "cannot close either" in dropped
    assert [text for text in texts if text in "abc"] == ["a", "b", "c"]
    assert set(recorder.snapshot().extra["sinks"]) == {"good"}
    recorder.close()


@pytest.mark.parametrize("nth", [1, 2])
def test_what_a_run_promises_to_keep_stops_it_when_it_cannot_be_kept_and_is_not_saved_either(nth: int) -> None:
    good = ListSink("good")
    recorder = Fanout(sinks=[good], essential=[FailingSink("jsonl", nth, OSError("no space left"))])
    recorder.emit(Notice(text="before the start"))
    with pytest.raises(RecorderError, match=r"jsonl: OSError: no space left.* start the same command again"):
        recorder.start(0)
        with recorder.step(0) as record:
            record(groups=(), batch=BATCH, report=REPORT)
    with pytest.raises(RecorderError):
        recorder.snapshot()
    with pytest.raises(RecorderError):
        recorder.check()
    recorder.emit(Notice(text="told to the others"))
    assert good.events(Notice)[-1].text == "told to the others"
    recorder.close()


def test_a_failure_of_another_thread_surfaces_in_the_loops() -> None:
    recorder = Fanout(sinks=[], essential=[FailingSink("jsonl", 1, OSError("no space left"))])
    recorder.start(0)
    thread = threading.Thread(target=recorder.emit, args=(Notice(text="saved"),))
    thread.start()
    thread.join()
    with pytest.raises(RecorderError), recorder.step(0):
        pass


def test_a_signal_is_not_mistaken_for_a_failing_sink() -> None:
    sink = FailingSink("bad", 1, Interrupted("stopped"))
    recorder = Fanout(sinks=[sink])
    recorder.start(0)
    with pytest.raises(Interrupted):
        recorder.emit(Notice(text="a"))


def test_when_every_sink_has_failed_the_run_goes_on() -> None:
    recorder = Fanout(sinks=[FailingSink("one", 1, OSError("x")), FailingSink("two", 1, ValueError("y"))])
    recorder.start(0)
    with recorder.step(0) as record:
        record(groups=(), batch=BATCH, report=REPORT)
    assert recorder.snapshot().extra == {"sinks": {}}
    recorder.close()
    recorder.close()


def test_each_sink_gets_its_own_state_back() -> None:
    one = Fanout(sinks=[ListSink("a")], live=[ListSink("b")])
    one.start(0)
    one.emit(Notice(text="x"))
    saved = json.loads(json.dumps(one.snapshot().extra))
    sink = ListSink("a")
    two = Fanout(sinks=[sink, ListSink("new")])
    two.load(Saved(tensors={}, extra=saved))
    two.start(3)
    assert sink.told[0] == (3, "resume", {"told": 2})


def test_a_saved_state_of_another_kind_is_refused() -> None:
    with pytest.raises(CheckpointError, match="cannot resume the recorders"):
        Fanout(sinks=[]).load(Saved(tensors={}, extra={"offset": 3}))


def test_many_threads_may_emit() -> None:
    sink = ListSink()
    recorder = Fanout(sinks=[sink])
    recorder.start(0)
    threads = [threading.Thread(target=lambda: [recorder.emit(Notice(text="x")) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    with recorder.step(0):
        for thread in threads:
            thread.join()
    assert len(sink.events(Notice)) == 800


def test_nothing_is_written_after_the_end() -> None:
    sink = ListSink()
    recorder = Fanout(sinks=[sink])
    recorder.start(0)
    recorder.close()
    recorder.emit(Notice(text="late"))
    assert sink.told[-1] == (-1, "closed")


def test_it_holds_nothing_of_steps_gone_by() -> None:
    import tracemalloc

    class NoSink(ListSink):
        def write(self, step: int, event: Event) -> None: ...

        def flush(self) -> None: ...
        def end_step(self, step: int) -> None: ...

    recorder = Fanout(sinks=[NoSink()])
    recorder.start(0)

    def run(steps: range) -> None:
        for step in steps:
            with recorder.step(step) as record:
                for name in ("generate", "train", "sleep", "wake_up"):
                    recorder.emit(PhaseDone(name=name, start=1.0, seconds=0.1))
                record(groups=[scored_group("q", (1.0, 0.0))], batch=BATCH, report=REPORT)

    run(range(50))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    run(range(50, 350))
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 100_000


def run_steps(run: Path, start: int, stop: int, *, kill_in: int | None = None) -> None:
    """Steps as a loop makes them, into files; killed in the middle of a step when asked to."""
    recorder = Fanout(sinks=[JsonlSink(run=run)])
    recorder.emit(Notice(text="a header"))
    recorder.start(start)
    for step in range(start, stop):
        try:
            with recorder.step(step) as record:
                recorder.emit(PhaseDone(name="train", start=1.0, seconds=0.1))
                record(groups=[scored_group(f"q{step}", (step % 2, 0.5))], batch=BATCH, report=REPORT)
                if step == kill_in:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            return


def test_a_run_killed_and_resumed_holds_the_lines_of_one_never_killed(tmp_path: Path) -> None:
    def lines(run: Path) -> list[str]:
        return [line for line in (run / "metrics.jsonl").read_text().splitlines() if '"kind":"timing"' not in line]

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_steps(whole, 0, 8)
    run_steps(killed, 0, 8, kill_in=2)  # before the first checkpoint: it starts afresh in the same folder
    run_steps(killed, 0, 8, kill_in=6)
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"kind":"metrics","step":7,"rew')
    run_steps(killed, 4, 8)
    assert lines(killed) == lines(whole)
    steps = [json.loads(line)["step"] for line in lines(killed)]
    assert steps == list(range(8))


def test_what_happens_between_two_steps_is_in_the_files_at_once(tmp_path: Path) -> None:
    recorder = Fanout(sinks=[JsonlSink(run=tmp_path)])
    recorder.start(0)
    recorder.emit(Notice(text="hello"))
    assert b"hello" in (tmp_path / "events.jsonl").read_bytes()
    with recorder.step(0):
        recorder.emit(Notice(text="within a step"))
    assert b"within a step" in (tmp_path / "events.jsonl").read_bytes()


def test_a_long_step_does_not_keep_its_events_to_itself(tmp_path: Path) -> None:
    clock = Clock()
    recorder = Fanout(sinks=[JsonlSink(run=tmp_path)], timer=clock)
    recorder.start(0)
    with recorder.step(0):
        clock.now += 1.0
        recorder.emit(Notice(text="seen while the step goes on"))
        assert b"seen while" in (tmp_path / "events.jsonl").read_bytes()
