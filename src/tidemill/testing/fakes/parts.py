"""A whole run on fakes, around the real leases and the real checkpoints: the smallest thing that has the life cycle."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from tidemill.checkpoint.attempts import next_attempt
from tidemill.checkpoint.manager import CheckpointManager
from tidemill.contracts.parts import Parts
from tidemill.contracts.state import Cursor, RunState
from tidemill.residency.manager import LeaseManager
from tidemill.testing.fakes.layouts import Layout, Whole
from tidemill.testing.fakes.meaning import (
    FakeAgreement,
    FakeAlgorithm,
    FakeData,
    FakeEvaluation,
    FakeRecorder,
    FakeRollout,
    FakeStop,
    FakeWarmUp,
)
from tidemill.testing.fakes.policy import FakeEngine, FakeTrainer, FakeWeightSync

__all__ = ["FakeRun", "Watched", "fake_parts"]

T = TypeVar("T")
Watch = Callable[[str], None]


class Watched:
    """Stands before a part and tells `watch` of every call to it, before and after: where a test kills the run."""

    def __init__(self, part: object, watch: Watch) -> None:
        self.__dict__.update(part=part, watch=watch)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.part, name)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            self.watch(f"before {type(self.part).__name__}.{name}")
            result = value(*args, **kwargs)
            self.watch(f"after {type(self.part).__name__}.{name}")
            return result

        return call

    def __len__(self) -> int:
        return len(self.part)


@dataclass
class FakeRun:
    """What outlives a process: a folder and the recorder's lines; and how the run is set up."""

    folder: Path
    steps: int = 6
    warm_up_steps: int = 2
    every: int = 2
    budget: int = 500
    mode: str = "sync"
    layout: Layout = field(default_factory=Whole)
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)


def fake_parts(run: FakeRun, watch: Watch = lambda name: None) -> Parts:
    """Fresh parts, as a new process would build them. In 500 bytes trainer and engine cannot both be awake."""

    def watched(part: T) -> T:
        return cast(T, Watched(part, watch))

    attempt = next_attempt(run.folder)
    recorder = watched(FakeRecorder(run.lines))
    trainer, engine = watched(FakeTrainer(run.layout)), watched(FakeEngine())
    residency = watched(LeaseManager(budget=run.budget, emit=recorder.emit, deadline=5.0))
    checkpointer = CheckpointManager(
        folder=run.folder / "checkpoints",
        stateful=[trainer, recorder],
        trainer=trainer,
        residency=residency,
        every=run.every,
        last_step=run.steps,
        mode=run.mode,
        keep_last=2,
        keep_every=0,
        on_failure="stop",
        walk_back=True,
        accept=(),
        identity={"model": "fake"},
        settings={},
        attempt=attempt,
        seed=0,
        grace=5.0,
        emit=recorder.emit,
    )
    return Parts(
        trainer=trainer,
        engine=engine,
        residency=residency,
        weights=watched(FakeWeightSync(residency)),
        checkpointer=watched(checkpointer),
        data=watched(FakeData()),
        rollout=watched(FakeRollout()),
        algorithm=watched(FakeAlgorithm()),
        agreement=watched(FakeAgreement()),
        warm_up=watched(FakeWarmUp(steps=run.warm_up_steps, data=FakeData(seed=1))),
        evaluation=watched(FakeEvaluation()),
        recorder=recorder,
        stop=FakeStop(),
        fresh_state=lambda: RunState(step=0, attempt=attempt, seed=0, cursor=Cursor(), warm_up_cursor=Cursor()),
    )
