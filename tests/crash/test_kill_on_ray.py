"""A run of two ranks on Ray itself, killed and resumed, ends as one on forked processes that nobody killed."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.crash.small_run import outcome, prepare, recipe, start

LIMIT = 300.0
GONE = 20.0  # seconds
FORKED = "cluster.use=tidemill.testing.spawned_cluster:SpawnedClusterSettings"
RANKS = ("trainer.ranks=2", "residency.park_groups=always")


class Start:
    """One start on Ray. What it starts is noted by whoever waits for it."""

    def __init__(self, words: list[str], log: Path, temporary: Path, faults: str = "") -> None:
        environment = {**os.environ, "TMPDIR": str(temporary), "TIDEMILL_FAULTS": faults, "OMP_NUM_THREADS": "1"}
        self.temporary, self.log = temporary, log
        self.before = log.stat().st_size if log.exists() else 0
        with log.open("ab") as file:
            command = [sys.executable, "-m", "tidemill.cli.main", *words]
            self.process = subprocess.Popen(command, stdout=file, stderr=file, process_group=0, env=environment)
        self.below: dict[int, psutil.Process] = {}

    def said(self) -> str:
        """Of this start alone."""
        return self.log.read_bytes()[self.before :].decode()

    def wait(self, *, metrics: Path = Path(), step: int = -1) -> None:
        """Until it ends; or, with a `step`, until `metrics` have that."""
        ends = time.monotonic() + LIMIT
        while self.process.poll() is None and not (step >= 0 and _has(metrics, step)):
            assert time.monotonic() < ends, self.said()[-3000:]
            with contextlib.suppress(psutil.NoSuchProcess):
                found = psutil.Process(self.process.pid).children(recursive=True)
                self.below |= {process.pid: process for process in found}
            time.sleep(0.05)

    def nothing_is_left(self) -> None:
        """No process that it started, and no private folder."""
        ends = time.monotonic() + GONE
        while (self._left() or list(self.temporary.iterdir())) and time.monotonic() < ends:
            time.sleep(0.05)
        assert self._left() == []
        assert list(self.temporary.iterdir()) == []

    def _left(self) -> list[str]:
        found = []
        for process in self.below.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline())[:80])
        return found

    def end(self) -> None:
        """Whatever the test has come to."""
        self.process.kill()
        self.process.wait()
        for process in self.below.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _has(metrics: Path, step: int) -> bool:
    return metrics.exists() and f'"step":{step}' in metrics.read_text()


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A short path: sockets lie below it."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.slow
def test_a_run_on_ray_whose_rank_and_whose_driver_were_killed_ends_as_one_on_forked_processes_never_killed(
    tmp_path: Path, temporary: Path
) -> None:
    prepare(tmp_path)
    run, whole, log = tmp_path / "run", tmp_path / "whole", tmp_path / "ray.log"
    forked = start(["run", str(recipe(tmp_path, whole)), FORKED, *RANKS], tmp_path / "forked.log")
    forked.join(LIMIT)
    assert forked.exitcode == 0, (tmp_path / "forked.log").read_text()[-3000:]
    words = ["run", str(recipe(tmp_path, run)), "cluster.use=ray", *RANKS]

    with contextlib.ExitStack() as stack:
        first = Start(words, log, temporary, "trainer-1/checkpoint.write=kill@3")
        stack.callback(first.end)
        first.wait()
        assert first.process.returncode == 1, first.said()[-3000:]
        assert re.search(r"trainer-1 on .* was killed", first.said()), first.said()[-3000:]
        assert len(first.below) > 3
        first.nothing_is_left()
        saved = {path.name for path in (run / "checkpoints").glob("step-*")}
        assert saved and f"step-{14:08d}" not in saved

        second = Start(words, log, temporary)
        stack.callback(second.end)
        second.wait(metrics=run / "metrics.jsonl", step=9)
        assert second.process.poll() is None, second.said()[-3000:]
        os.kill(second.process.pid, signal.SIGKILL)
        second.process.wait()
        second.nothing_is_left()

        last = Start(words, log, temporary)
        stack.callback(last.end)
        last.wait()
        assert last.process.returncode == 0, last.said()[-3000:]
        assert "resuming from step-" in last.said()
        last.nothing_is_left()
    assert outcome(run) == outcome(whole)
