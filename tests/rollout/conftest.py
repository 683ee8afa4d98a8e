"""Small engines and trajectories for the tests of this folder."""

from collections.abc import Callable
from typing import Any

import pytest

from tidemill.contracts.engine import Completion
from tidemill.contracts.sample import Prompt, Score, ScoreStatus, StopReason, Trajectory
from tidemill.contracts.state import PolicyVersion


class ScriptedEngine:
    """Answers each request with its key as text; requests named in `failing` fail."""

    name = "scripted"

    def __init__(self, failing: Any = ()) -> None:
        self.failing = failing
        self.samplings: list[Any] = []

    def generate(self, requests: Any, sampling: Any) -> list[Completion]:
        self.samplings.append(sampling)
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Completion:
        failed = request.key in self.failing
        ids = () if failed else (*request.token_ids, 2)
        return Completion(
            token_ids=ids,
            logprobs=(-0.1,) * len(ids),
            stop_reason=StopReason.FAILED if failed else StopReason.EOS,
            version=PolicyVersion(0, 3),
            text=request.key,
        )


class LengthReward:
    """The length of the text; keeps what it was given."""

    def __init__(self) -> None:
        self.given: list[str] = []

    def score(self, trajectories: Any) -> list[Score]:
        self.given += [trajectory.id for trajectory in trajectories]
        return [Score(value=float(len(trajectory.text))) for trajectory in trajectories]

    def close(self) -> None:
        pass


@pytest.fixture
def engine() -> Callable[..., ScriptedEngine]:
    return ScriptedEngine


@pytest.fixture
def reward() -> LengthReward:
    return LengthReward()


@pytest.fixture
def prompts() -> list[Prompt]:
    return [Prompt(id=f"q{n}", key=f"0:q{n}", token_ids=(n, n + 1), text=f"prompt {n}", label=n) for n in range(3)]


@pytest.fixture
def trajectory() -> Callable[..., Trajectory]:
    """One trajectory with this reward (None abstains, "failed" failed), or other fields changed."""

    def make(value: Any = 1.0, *, sample: int = 0, row: str = "q", parts: Any = None, **changes: Any) -> Trajectory:
        status = ScoreStatus.SCORED if isinstance(value, float) else ScoreStatus.ABSTAINED
        score = Score(value=value, status=status, parts=parts or {}) if value != "failed" else None
        if value == "failed":
            score = Score(value=None, status=ScoreStatus.FAILED, reason="why")
        fields: dict[str, Any] = {
            "prompt": Prompt(
                id=row, key=f"0:{row}", token_ids=(1, 2), text="ask", label="x", extra={"level": [1, None]}
            ),
            "sample": sample,
            "token_ids": (5, 6),
            "logprobs": (-0.5, -0.25),
            "loss_mask": (True, False),
            "version": PolicyVersion(2, 7),
            "stop_reason": StopReason.EOS,
            "text": "answer",
            "score": score,
        }
        return Trajectory(**{**fields, **changes})

    return make
