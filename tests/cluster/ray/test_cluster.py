"""tidemill.cluster.ray.cluster: a trainer of several ranks, placed, called, and a whole run of it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.crash.small_run import prepare, recipe

from tidemill.cluster.ray.cluster import RayCluster
from tidemill.config.engine import replicas_for
from tidemill.contracts.cluster import Cluster
from tidemill.contracts.engine import RolloutEngine
from tidemill.contracts.events import Event, Notice
from tidemill.contracts.footprint import Part
from tidemill.contracts.workers import Place
from tidemill.errors import ClusterError, DataError, WorkerDiedError
from tidemill.testing.fakes.rank_trainer import build_fake_rank

seen: list[Event] = []


def settings(folder: Path) -> dict[str, Any]:
    return {
        "device": "auto",
        "ranks": 2,
        "replicas": 1,
        "max_batch": 4,
        "seed": 3,
        "threads": 1,
        "transition_deadline": 30.0,
        "log_folder": folder / "logs",
        "emit": seen.append,
    }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    made = RayCluster(**settings(tmp_path_factory.mktemp("run")))
    yield made
    made.close()
    made.close()


def refuse_to_build(place: Place, emit: Any) -> RolloutEngine:
    print("about to refuse")  # noqa: T201
    raise DataError(f"cannot read the model: replica {place.rank} of {place.ranks}")


def test_a_trainer_of_two_ranks_is_one_to_its_user(cluster: RayCluster) -> None:
    checked: Cluster = cluster
    trainer = checked.trainer(build_fake_rank, ranks=2)
    assert trainer.footprint(Part.ALL) == 350
    assert (checked.device, checked.shares_devices) == ("cpu", True)
    assert 0 < checked.free_bytes() < psutil.virtual_memory().total
    with pytest.raises(ClusterError, match="cannot place 3 processes of the trainer: this cluster was made for 2"):
        cluster.trainer(build_fake_rank, ranks=3)
    trainer.close()


def test_what_a_worker_cannot_build_is_told_as_it_was_raised_and_its_output_is_shown(cluster: RayCluster) -> None:
    with pytest.raises(DataError, match="cannot read the model: replica 0 of 1"):
        cluster.engine(refuse_to_build, replicas=1)
    shown = Notice(text="engine-0 | about to refuse")
    ends = time.monotonic() + 10
    while shown not in seen and time.monotonic() < ends:
        time.sleep(0.05)
    assert shown in seen


def test_a_process_has_one_cluster_at_a_time(cluster: RayCluster, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="connected to a Ray cluster already"):
        RayCluster(**settings(tmp_path))


def test_a_cluster_that_is_gone_is_told_at_once_and_closed_in_seconds(cluster: RayCluster, tmp_path: Path) -> None:
    cluster.close()
    others = psutil.Process().children(recursive=True)  # fork servers that earlier tests use
    made = RayCluster(**settings(tmp_path))
    trainer = made.trainer(build_fake_rank, ranks=2)
    below = [process for process in psutil.Process().children(recursive=True) if process not in others]
    (daemon,) = (process for process in below if process.name() == "gcs_server")
    daemon.kill()
    began = time.monotonic()
    # Calls go past this daemon: nothing but a look at the cluster tells.
    with pytest.raises(WorkerDiedError, match="ended by itself; start the same command again"):
        while time.monotonic() - began < 10:
            trainer.sleep()
            trainer.wake_up(Part.ALL)
    made.close()
    assert time.monotonic() - began < 15
    assert [process for process in below if process.is_running()] == []


def test_replicas_are_one_on_each_gpu_that_is_shared() -> None:
    assert replicas_for("auto", ranks=4, shares_gpus=True) == 4
    assert replicas_for("auto", ranks=4, shares_gpus=False) == 1
    assert replicas_for(2, ranks=4, shares_gpus=True) == 2
    assert replicas_for("auto", ranks=0, shares_gpus=True) == 1


def run(base: Path, folder: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tidemill.cli.main", "run", str(recipe(base, folder))]
    words = ["cluster.use=ray", "trainer.ranks=2", "engine.replicas=1"]
    return subprocess.Popen(
        [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )


def steps_of(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum('"metrics"' in line for line in (folder / "metrics.jsonl").read_text().splitlines())
    return 0


@pytest.mark.slow
def test_a_run_that_ctrl_c_stops_saves_and_leaves_nothing_behind(tmp_path: Path) -> None:
    prepare(tmp_path)
    folder = tmp_path / "run"
    first = run(tmp_path, folder)
    ends = time.monotonic() + 120
    while steps_of(folder) < 4 and time.monotonic() < ends and first.poll() is None:
        time.sleep(0.05)
    below = psutil.Process(first.pid).children(recursive=True)
    assert sum(process.name().startswith("ray::RayWorker") for process in below) == 3
    os.killpg(first.pid, signal.SIGINT)
    _, err = first.communicate(timeout=120)
    assert first.returncode == 130, err
    assert "starting 2 trainer ranks and 1 engine replica, on cpu, on a private Ray cluster" in err
    assert list((folder / "checkpoints").iterdir())
    _, alive = psutil.wait_procs(below, timeout=10)
    assert alive == []
    assert "raylet" not in err
    logs = {"engine-0.log", "trainer-0.log", "trainer-1.log"}
    assert {path.name for path in (folder / "logs").iterdir()} == logs
