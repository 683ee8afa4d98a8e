"""Real processes, killed with SIGKILL at random moments and at named points, end as one that was never killed."""

import json
import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.crash.small_run import Outcome, outcome, prepare, recipe, start

KILLS = int(os.environ.get("TIDEMILL_TEST_KILLS", "30"))
LIMIT = 120.0


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a run ü")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def whole(base: Path) -> tuple[Outcome, float]:
    seconds = 0.0
    for name in ("first", "whole"):  # the first start waits for the fork server's imports
        began = time.monotonic()
        process = start(["run", str(recipe(base, base / name))], base / f"{name}.log")
        process.join(LIMIT)
        assert process.exitcode == 0, (base / f"{name}.log").read_text()[-3000:]
        seconds = time.monotonic() - began
    assert outcome(base / "first") == outcome(base / "whole")
    return outcome(base / "whole"), seconds


def wait_for_step(run: Path, step: int, process: BaseProcess) -> None:
    metrics = run / "metrics.jsonl"
    deadline = time.monotonic() + LIMIT
    while not (metrics.exists() and f'"step":{step}' in metrics.read_text()):
        assert time.monotonic() < deadline
        assert process.is_alive()
        time.sleep(0.005)


@pytest.mark.slow
def test_a_run_killed_at_thirty_random_moments_ends_bit_for_bit_as_one_never_killed(
    base: Path, whole: tuple[Outcome, float]
) -> None:
    wanted, seconds = whole
    rng = random.Random(2026)
    kills = number = 0
    while kills < KILLS:
        number += 1
        run, log = base / f"killed {number}", base / f"killed {number}.log"
        words = ["run", str(recipe(base, run))]
        for _ in range(4):
            process = start(words, log)
            process.join(rng.uniform(0.02, seconds))
            if process.exitcode is None:
                os.kill(process.pid or 0, signal.SIGKILL)
                kills += 1
            process.join(LIMIT)
            assert process.exitcode in (0, -signal.SIGKILL), log.read_text()[-3000:]
            if process.exitcode == 0:
                break
        process = start(words, log)
        process.join(LIMIT)
        assert process.exitcode == 0, log.read_text()[-3000:]
        assert outcome(run) == wanted


POINTS = [
    "checkpoint.write=kill@2",
    "checkpoint.fsync-manifest=kill@2",
    "checkpoint.rename=kill@2",
    "checkpoint.fsync-parent=kill@2",
    "checkpoint.acknowledged=kill@2",
    "checkpoint.retention.rename=kill",
    "export.rename=kill",
]


@pytest.mark.parametrize("point", POINTS)
def test_a_run_killed_at_a_named_point_ends_as_one_never_killed(
    base: Path, whole: tuple[Outcome, float], point: str
) -> None:
    run, log = base / f"at {point}", base / f"at {point}.log"
    words = ["run", str(recipe(base, run))]
    process = start(words, log, point)
    process.join(LIMIT)
    assert process.exitcode == -signal.SIGKILL, log.read_text()[-3000:]
    process = start(words, log)
    process.join(LIMIT)
    assert process.exitcode == 0, log.read_text()[-3000:]
    assert outcome(run) == whole[0]
    counts = [json.loads((folder / "summary.json").read_text())["checkpoints"] for folder in (run, base / "whole")]
    assert counts == [5, 5]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_next_start_ends_as_if_nothing_had_been(
    base: Path, whole: tuple[Outcome, float], number: signal.Signals, code: int
) -> None:
    run, log = base / f"stopped by {number.name}", base / f"{number.name}.log"
    words = ["run", str(recipe(base, run)), "checkpoint.every=0"]
    process = start(words, log)
    wait_for_step(run, 6, process)
    os.kill(process.pid or 0, number)
    process.join(LIMIT)
    assert process.exitcode == code, log.read_text()[-3000:]
    assert [p for p in (run / "checkpoints").iterdir() if p.name.startswith("step-")]
    process = start(words, log)
    process.join(LIMIT)
    assert process.exitcode == 0, log.read_text()[-3000:]
    assert outcome(run) == whole[0]


def test_a_run_that_nobody_listens_to_ends_well(base: Path, whole: tuple[Outcome, float]) -> None:
    run = base / "unheard"
    process = start(["run", str(recipe(base, run))], None)
    process.join(LIMIT)
    assert process.exitcode == 0
    assert outcome(run) == whole[0]


def test_a_signal_saves_a_run_that_nobody_listens_to(base: Path, whole: tuple[Outcome, float]) -> None:
    run = base / "unheard and stopped"
    words = ["run", str(recipe(base, run)), "checkpoint.every=0"]
    process = start(words, None)
    wait_for_step(run, 6, process)
    os.kill(process.pid or 0, signal.SIGTERM)
    process.join(LIMIT)
    assert process.exitcode == 143
    assert [p for p in (run / "checkpoints").iterdir() if p.name.startswith("step-")]
    process = start(words, None)
    process.join(LIMIT)
    assert process.exitcode == 0
    assert outcome(run) == whole[0]
