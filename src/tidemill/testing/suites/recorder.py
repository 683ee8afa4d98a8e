"""What every sink of `Recorder` must do. Subclass `SinkSuite` and override `make`.

A recorder plug-in proves itself with these tests: it takes every event there is, gives its state as JSON values, goes
on after a crash, and can be closed twice.
"""

import json
import time
from pathlib import Path
from typing import get_args

import numpy as np

from tidemill.contracts.batch import Batch
from tidemill.contracts.events import (
    CheckpointEvent,
    Evaluated,
    Event,
    Learned,
    Memory,
    Metrics,
    Notice,
    PhaseDone,
    Progress,
    RolloutDone,
    TokenApart,
    TokensApart,
    Transition,
    WeightsCompared,
)
from tidemill.contracts.recorder import Sink
from tidemill.contracts.sample import Group, Prompt, Score, ScoreStatus, StopReason, Trajectory
from tidemill.contracts.state import PolicyVersion

__all__ = ["SinkSuite", "every_event", "scored_group"]

HOSTILE = "bell\x07 esc\x1b[31m nul\x00 [bold]markup[/bold] </script> \u202e \ud83d half \u2028 end"


def scored_group(text: str, rewards: tuple[float | None, ...]) -> Group:
    """One prompt and an answer for each reward; None is an abstention."""
    prompt = Prompt(id="row", key=f"0:{len(text)}", token_ids=(1,), text=text, label={"answer": [1, text]})

    def answer(sample: int, reward: float | None) -> Trajectory:
        score = (
            Score(value=reward) if reward is not None else Score(value=None, status=ScoreStatus.ABSTAINED, reason=text)
        )
        return Trajectory(
            prompt=prompt,
            sample=sample,
            token_ids=(2, 3),
            logprobs=(-0.1, -0.2),
            loss_mask=(True, True),
            version=PolicyVersion(1, 0),
            stop_reason=StopReason.EOS,
            text=f"{text} #{sample}",
            score=score,
        )

    return Group(prompt=prompt, trajectories=tuple(answer(i, reward) for i, reward in enumerate(rewards)))


def _apart(text: str) -> TokenApart:
    return TokenApart(
        trajectory=text,
        version=1,
        position=0,
        token_id=5,
        text=text,
        before=text,
        engine=float("-inf"),
        trainer=float("nan"),
    )


def every_event(text: str) -> list[Event]:
    """One of each, with `text` wherever a text may stand, and numbers that are none."""
    return [
        Metrics(values={"reward/mean": 0.5, "policy/loss": float("nan"), "policy/kl": float("inf"), "policy/lr": 1e-5}),
        Metrics(values={"time/step": 0.1, "time/other": 0.01}),
        PhaseDone(name="generate", start=time.time(), seconds=0.05, owner="engine"),
        Memory(time=time.time(), what=text, device={"trainer": 1 << 20}, host={"trainer": 0}, budget=1 << 21),
        Transition(what=text, owner="trainer", start=time.time(), seconds=0.0, copied=1, waited=0.1, left={text: 1}),
        WeightsCompared(owner=text, compared=1, total=8),
        CheckpointEvent(time=time.time(), status="staged", step=1, path="step-1", bytes=10, seconds=0.1),
        CheckpointEvent(time=time.time(), status="durable", step=1, path="step-1", bytes=10, seconds=0.2),
        CheckpointEvent(time=time.time(), status="failed", step=2, path="step-2", reason=text),
        RolloutDone(kind="train", groups=[scored_group(text, (1.0, None, 0.0))]),
        RolloutDone(kind="eval", groups=[]),
        Learned(groups=[scored_group(text, (1.0,))], batch=_batch(), logprobs=_batch().logprobs),
        TokensApart(tokens=[_apart(text)]),
        Evaluated(values={"eval/exact_match": 0.25, "eval/reward": float("nan")}),
        Progress(what=text, done=1, total=0),
        Progress(what=text, done=1, total=2),
        Progress(what=text, done=2, total=2),
        Notice(text=text),
        Notice(text=text, level="warning", details={"nested": {"value": float("nan"), "path": Path("x")}}),
    ]


def _batch() -> Batch:
    return Batch(
        token_ids=np.array([1, 2, 3]),
        offsets=np.array([0, 3]),
        loss_mask=np.array([False, True, True]),
        logprobs=np.zeros(3, dtype=np.float32),
        advantages=np.ones(3, dtype=np.float32),
        metrics={},
    )


class SinkSuite:
    """Contract of `Sink`. `resume` comes before the first `write`; a fresh start is `resume(0, {})`."""

    def make(self, run: Path) -> Sink:
        """A sink of the run in this folder, as a new process would make it."""
        raise NotImplementedError

    def test_it_takes_every_event_and_every_text(self, tmp_path: Path) -> None:
        sink = self.make(tmp_path)
        sink.resume(0, {})
        for event in [*every_event("plain"), *every_event(HOSTILE), *every_event("")]:
            sink.write(0, event)
        sink.end_step(0)
        sink.close()

    def test_no_event_is_forgotten_here(self) -> None:
        assert {type(event) for event in every_event("")} == set(get_args(Event))

    def test_its_name_is_that_of_a_setting(self, tmp_path: Path) -> None:
        assert self.make(tmp_path).name.isidentifier()

    def test_its_state_is_json_and_it_goes_on_from_it(self, tmp_path: Path) -> None:
        first = self.make(tmp_path)
        first.resume(0, {})
        for step in range(3):
            for event in every_event(f"step {step}"):
                first.write(step, event)
            first.end_step(step)
        state = json.loads(json.dumps(dict(first.state()), allow_nan=False))
        first.close()
        second = self.make(tmp_path)
        second.resume(2, state)
        for event in every_event("again"):
            second.write(2, event)
        second.end_step(2)
        second.close()

    def test_it_goes_on_without_a_state(self, tmp_path: Path) -> None:
        sink = self.make(tmp_path)
        sink.resume(5, {})
        sink.write(5, Metrics(values={"reward/mean": 1.0}))
        sink.end_step(5)
        sink.close()

    def test_it_can_be_closed_twice_and_unopened(self, tmp_path: Path) -> None:
        unopened = self.make(tmp_path)
        unopened.close()
        sink = self.make(tmp_path)
        sink.resume(0, {})
        sink.close()
        sink.close()

    def test_a_step_without_an_event_is_none(self, tmp_path: Path) -> None:
        sink = self.make(tmp_path)
        sink.resume(0, {})
        sink.end_step(0)
        assert isinstance(dict(sink.state()), dict)
        sink.close()
