"""Parts of one's own, by `module:Class` of a settings class: tidemill.app.build, tidemill.app.recording."""

import json
import sys
from pathlib import Path

import pytest
from tests.crash.small_run import prepare, recipe

from tidemill.cli.main import main

LAB = '''
from typing import ClassVar

from tidemill.algorithms.grpo import Grpo
from tidemill.config.algorithm import AlgorithmSettings
from tidemill.config.environment import EnvironmentSettings
from tidemill.config.recorder import SinkSettings
from tidemill.environments.single_turn import SingleTurn


class ScaledSettings(AlgorithmSettings):
    implementation: ClassVar[str] = "own_parts:Scaled"
    least_samples: ClassVar[int] = 2

    scale: float = 2.0
    """Factor on every advantage."""


class Scaled:
    def __init__(self, *, temperature, scale):
        self.inner = Grpo(clip_low=0.2, clip_high=0.2, normalize_std=True, temperature=temperature)
        self.scale = scale

    @property
    def loss(self):
        return self.inner.loss

    def batch(self, groups):
        batch = self.inner.batch(groups)
        batch.advantages[:] *= self.scale
        batch.metrics["lab/scale"] = self.scale
        return batch


class PlaySettings(EnvironmentSettings):
    implementation: ClassVar[str] = "own_parts:Play"


class Play:
    def __init__(self):
        self.inner = SingleTurn()

    def play(self, generate, prompts, samples):
        return self.inner.play(generate, prompts, samples)


class ListSettings(SinkSettings):
    implementation: ClassVar[str] = "own_parts:ListSink"


class ListSink:
    name = "list"

    def __init__(self, *, folder):
        self.path = folder / "list.txt"

    def write(self, step, event):
        with self.path.open("a") as file:
            file.write(f"{step} {type(event).__name__}\\n")

    def flush(self):
        pass

    def end_step(self, step):
        pass

    def state(self):
        return {}

    def resume(self, step, state):
        pass

    def close(self):
        pass
'''


def test_algorithm_environment_and_recorder_of_ones_own_make_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_parts.py").write_text(LAB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_parts", raising=False)
    prepare(tmp_path)
    run = tmp_path / "run"
    words = [
        "algorithm.use=own_parts:ScaledSettings", "algorithm.scale=0.5", "environment.use=own_parts:PlaySettings",
        'recorder.use=["own_parts:ListSettings"]', "steps=6", "eval.every=0",
    ]  # fmt: skip
    assert main(["run", str(recipe(tmp_path, run)), *words, "--quiet"]) == 0
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {line["lab/scale"] for line in lines if "lab/scale" in line} == {0.5}
    assert "4 RolloutDone" in (run / "list.txt").read_text()


def test_a_plug_in_that_is_not_there_is_refused_with_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(tmp_path)
    words = ["run", str(recipe(tmp_path, tmp_path / "run"))]
    assert main([*words, "algorithm.use=grpp"]) == 2
    assert "did you mean grpo?" in capsys.readouterr().err
    assert main([*words, "engine.use=no_such_place:Engine"]) == 2
    assert "no_such_place" in capsys.readouterr().err
