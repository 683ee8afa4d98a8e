"""Trajectories to score, and a check that no reward process outlives its test."""

from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from tidemill.contracts.sample import Prompt, StopReason, Trajectory
from tidemill.contracts.state import PolicyVersion
from tidemill.rewards.function import FunctionReward


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    """By what this process itself started."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    after = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    assert after == []


@pytest.fixture
def answers() -> Callable[..., list[Trajectory]]:
    """Trajectories of one prompt, or of several, with these texts."""

    def make(*texts: str, label: Any = None, samples: int = 10_000, extra: Any = None) -> list[Trajectory]:
        made = []
        for number, text in enumerate(texts):
            row = f"q{number // samples}"
            prompt = Prompt(
                id=row, key=f"0:{row}", token_ids=(1, 2), text="the question", label=label, extra=extra or {}
            )
            made.append(
                Trajectory(
                    prompt=prompt,
                    sample=number % samples,
                    token_ids=(5, 6),
                    logprobs=(-0.5, -0.5),
                    loss_mask=(True, True),
                    version=PolicyVersion(0, 0),
                    stop_reason=StopReason.EOS,
                    text=text,
                )
            )
        return made

    return make


@pytest.fixture
def function() -> Iterator[Callable[..., FunctionReward]]:
    """FunctionReward of a function with short limits, closed when the test ends."""
    made: list[FunctionReward] = []

    def make(use: str, **changes: Any) -> FunctionReward:
        values: dict[str, Any] = {
            "timeout": 1.0,
            "memory": 1 << 28,
            "workers": 1,
            "failure_budget": 1.0,
            "emit": lambda event: None,
        }
        made.append(FunctionReward(use=use, **{**values, **changes}))
        return made[-1]

    yield make
    for reward in made:
        reward.close()
