"""A run on several hosts, by Ray alone: several Ray nodes on this machine, in a process of their own (two_hosts.py)."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("two_hosts.py")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Any]]:
    """What the script saw. Its folder has a short path: sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="two-", dir="/tmp"))
    root = Path(__file__).parents[3]
    environment = {
        **os.environ,
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "PYTHONPATH": str(root),
        "HOME": str(folder),
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=280,
    )
    try:
        assert done.returncode == 0, done.stderr[-3000:]
        values: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        yield values
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_ranks_on_different_hosts_meet_by_an_address_that_both_reach(found: dict[str, Any]) -> None:
    meeting = found["meeting"]
    assert meeting["nodes"] == 2
    host = found["address"].partition(":")[0]
    assert meeting["rendezvous"].startswith(f"{host}:")
    assert meeting["interface"] not in ("", "not set")
    assert meeting["sum"] == [3.0, 3.0]
    assert meeting["free"] > 0


def test_a_cluster_too_small_is_refused_with_both_numbers(found: dict[str, Any]) -> None:
    assert "the Ray cluster has 2 CPUs, and 3 are needed for 3 trainer ranks; lower cluster.cpus" in found["too many"]
    assert "the Ray cluster has 2 GPUs, and 3 are needed for 2 trainer ranks and 1" in found["too many gpus"]
    assert 'cluster.placement = "colocated"' in found["too many gpus"]


def test_gpus_that_are_not_there_are_refused(found: dict[str, Any]) -> None:
    assert "the Ray cluster has no GPU" in found["no gpu"]


def test_a_busy_cluster_is_refused_with_what_is_free(found: dict[str, Any]) -> None:
    assert "2 CPUs are needed, 0 of 2 are free" in found["busy"]


def test_a_host_that_does_not_see_the_run_folder_is_refused(found: dict[str, Any]) -> None:
    assert found["unshared"].startswith("ClusterError: cannot use ")
    assert "cannot use the run folder /tmp/two-" in found["unshared"]


def test_a_host_with_another_torch_is_refused_and_both_are_named(found: dict[str, Any]) -> None:
    assert " has torch 9.9, and " in found["versions"]
    assert "the driver's host, has torch " in found["versions"]


def test_a_host_whose_pytorch_sees_no_gpu_is_refused(found: dict[str, Any]) -> None:
    assert "for trainer-0 on cuda: PyTorch" in found["no cuda"]


def test_colocated_a_rank_and_a_replica_share_one_gpu(found: dict[str, Any]) -> None:
    gpus = found["colocated"]
    assert (gpus["device"], gpus["shares"]) == ("cuda", True)
    assert gpus["trainer"] == gpus["engine"]
    assert sorted(gpu for (gpu,) in gpus["trainer"]) == ["0", "1"]


def test_separate_a_rank_and_a_replica_have_gpus_of_their_own(found: dict[str, Any]) -> None:
    gpus = found["separate"]
    assert (gpus["device"], gpus["shares"]) == ("cuda", False)
    assert {gpu for (gpu,) in gpus["trainer"]} & {gpu for (gpu,) in gpus["engine"]} == set()


def test_no_worker_outlives_a_killed_driver(found: dict[str, Any]) -> None:
    assert found["orphans"] == []


def test_the_death_of_a_host_is_reported_in_seconds(found: dict[str, Any]) -> None:
    assert "died (its host is gone" in found["death"]["error"]
    assert found["death"]["seconds"] < 30
