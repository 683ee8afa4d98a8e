"""`tidemill rollout`, with engines where the settings want them (tidemill.app.rollout); see test_whole_run.py too."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.crash.small_run import prepare, recipe

from tidemill.cli.main import main

SPAWNED = "cluster.use=tidemill.testing.spawned_cluster:SpawnedClusterSettings"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rollouts")
    prepare(folder)
    return folder


def rolled(base: Path, name: str, *words: str) -> Any:
    """The dump of `tidemill rollout`, line by line."""
    out = base / name
    code = main(["rollout", str(recipe(base, base / "untouched")), "--out", str(out), "--limit", "5", *words, "--json"])
    assert code == 0
    assert not (base / "untouched").exists()
    return [json.loads(line) for line in (out / "step-00000000.jsonl").read_text().splitlines()]


def _answer(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "logprobs"}


@pytest.mark.parametrize(
    "cluster",
    [
        (SPAWNED,),
        (SPAWNED, "engine.replicas=2", "engine.max_batch=3"),
        pytest.param(("cluster.use=ray", "engine.replicas=2", "trainer.ranks=3"), marks=pytest.mark.slow),
    ],
    ids=["one", "several", "ray"],
)
def test_answers_are_the_same_from_any_number_of_engines_wherever_they_live(
    base: Path, cluster: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    alone = rolled(base, f"alone beside {request.node.name}")
    found = rolled(base, request.node.name, *cluster)
    assert [_answer(line) for line in found] == [_answer(line) for line in alone]
    # Batches of other sizes round differently.
    apart = [np.abs(np.subtract(a["logprobs"], b["logprobs"])).max() for a, b in zip(found, alone, strict=True)]
    assert max(apart) < 1e-5
    names = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
    assert not [name for name in names if "raylet" in name or "RayWorker" in name]


def test_as_many_engines_as_are_asked_for_are_started_and_no_trainer(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tidemill.testing import spawned_cluster

    made: list[tuple[str, int]] = []

    class Noted(spawned_cluster.SpawnedGroup):
        def __init__(self, role: str, size: int, **options: Any) -> None:
            made.append((role, size))
            super().__init__(role, size, **options)

    monkeypatch.setattr(spawned_cluster, "SpawnedGroup", Noted)
    rolled(base, "counted", SPAWNED, "engine.replicas=2", "trainer.ranks=2")
    assert made == [("engine", 2)]


def test_several_engines_need_a_cluster_here_too(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = base / "refused"
    words = ["rollout", str(recipe(base, base / "untouched")), "--out", str(out), "engine.replicas=2"]
    assert main(words) == 2
    assert 'needs several processes; set cluster.use = "ray", or this to 1' in capsys.readouterr().err
    assert not out.exists()
