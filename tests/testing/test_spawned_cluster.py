"""tidemill.testing.spawned_cluster, and through it tidemill.contracts.cluster: runs of several ranks without Ray."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.crash.small_run import STEPS, prepare, recipe

from tidemill.cli.main import main
from tidemill.contracts.cluster import Cluster
from tidemill.contracts.events import ignore
from tidemill.contracts.footprint import Part
from tidemill.errors import ClusterError
from tidemill.testing.fakes.rank_trainer import build_fake_rank
from tidemill.testing.spawned_cluster import SpawnedCluster
from tidemill.testing.suites.trainer import awake

SPAWNED = "cluster.use=tidemill.testing.spawned_cluster:SpawnedClusterSettings"
SETTINGS: dict[str, Any] = {
    "device": "auto",
    "ranks": 2,
    "replicas": 1,
    "max_batch": 8,
    "seed": 3,
    "threads": 1,
    "transition_deadline": 20.0,
    "log_folder": Path(),
    "emit": ignore,
    "deadline": 30.0,
}


@pytest.fixture
def cluster() -> Iterator[SpawnedCluster]:
    made = SpawnedCluster(**SETTINGS)
    yield made
    made.close()
    made.close()


def test_a_trainer_of_two_ranks_is_placed_in_processes_that_begin_with_the_runs_seed(cluster: SpawnedCluster) -> None:
    checked: Cluster = cluster
    trainer = checked.trainer(build_fake_rank, ranks=2)
    assert trainer.footprint(Part.ALL) == 350
    assert list(cluster.pids) == ["trainer-0", "trainer-1"]
    assert (checked.device, checked.shares_devices) == ("cpu", True)
    assert checked.free_bytes() > 0
    with awake(trainer):
        first, second = trainer.snapshot().extra["rank_random"]
    assert first == second
    assert first["python"]["words"][:624] == _words_of(3)


def _words_of(seed: int) -> list[int]:
    return list(random.Random(seed).getstate()[1])[:624]


def test_forked_processes_have_no_gpu() -> None:
    with pytest.raises(ClusterError, match="no GPUs"):
        SpawnedCluster(**(SETTINGS | {"device": "cuda"}))


def test_a_whole_run_of_two_ranks_and_two_replicas_is_saved_in_shards_and_ends(tmp_path: Path) -> None:
    prepare(tmp_path)
    run = tmp_path / "run"
    words = [SPAWNED, "trainer.ranks=2", "engine.replicas=2", "residency.offload=always", "--quiet"]
    assert main(["run", str(recipe(tmp_path, run)), *words]) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["finished"] is True
    assert summary["sleeps"] > 0
    last = run / "checkpoints" / f"step-{STEPS:08d}"
    assert sorted(path.name for path in last.glob("trainer-*")) == [
        f"trainer-{rank:05d}-of-00002.safetensors" for rank in range(2)
    ]
    assert main(["ckpt", "verify", str(run)]) == 0
