"""Plug-ins that swallow what is not theirs: a stop must reach the loop through them (`tidemill.app.run`)."""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from tests.crash.small_run import STEPS, outcome, prepare, recipe

from tidemill.cli.main import main
from tidemill.config.environment import EnvironmentSettings
from tidemill.contracts.engine import Generate
from tidemill.contracts.sample import Prompt, Trajectory
from tidemill.environments.single_turn import SingleTurn

NAME = "tests.app.test_hostile_plug_ins"
arrived: list[signal.Signals] = []


class TryingAgain(SingleTurn):
    """Takes every exception for one of its own, and is sent a signal in its third episode."""

    def play(self, generate: Generate, prompts: Sequence[Prompt], samples: int) -> list[list[Trajectory]]:
        tries = 0
        while True:
            tries += 1
            assert tries < 3, "what was raised did not get out"
            try:
                if len(self.played) == 2 and not arrived:
                    arrived.append(signal.SIGTERM)
                    os.kill(os.getpid(), signal.SIGTERM)
                self.played.append(len(prompts))
                return super().play(generate, prompts, samples)
            except Exception:
                continue

    played: ClassVar[list[int]] = []


class TryingAgainSettings(EnvironmentSettings):
    """An environment of somebody else."""

    implementation: ClassVar[str] = f"{NAME}:TryingAgain"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    prepare(folder)
    return folder


def test_an_environment_that_catches_every_exception_does_not_catch_a_stop(base: Path) -> None:
    run = base / "run"
    words = [
        "run", str(recipe(base, run)), f"environment.use={NAME}:TryingAgainSettings", "checkpoint.every=0",
        "eval.every=0", "--quiet",
    ]  # fmt: skip
    assert main(words) == 143
    assert len(TryingAgain.played) == 2
    (saved,) = (path.name for path in (run / "checkpoints").iterdir() if path.name.startswith("step-"))
    assert main(words) == 0
    whole = base / "whole"
    assert main(["run", str(recipe(base, whole)), "checkpoint.every=0", "eval.every=0", "--quiet"]) == 0
    assert saved == "step-00000006"
    assert outcome(run) == outcome(whole)
    assert json.loads((run / "summary.json").read_text())["steps"] == STEPS
