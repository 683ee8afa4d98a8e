"""A run of two ranks and an engine process: whichever process is killed, at whichever named point, it resumes equal."""

import json
import signal
from pathlib import Path

import pytest

from tests.crash.small_run import Outcome, outcome, prepare, recipe, start

LIMIT = 180.0
RANKS = ["cluster.use=tidemill.testing.spawned_cluster:SpawnedClusterSettings", "trainer.ranks=2"]

# Points of the driver. `@2`: not the first time, so that there is something to lose.
DRIVER = [
    "checkpoint.mkdir=kill@2",
    "checkpoint.fsync-manifest=kill@2",
    "checkpoint.fsync-attempt=kill@2",
    "checkpoint.rename=kill@2",
    "checkpoint.fsync-parent=kill@2",
    "checkpoint.acknowledged=kill@2",
    "checkpoint.retention.rename=kill",
    "checkpoint.retention.unlink=kill",
    "weights.publish=kill@4",
    "rollout.dump.write=kill@4",
    "export.open=kill",
    "export.rename=kill",
]
# Points of a worker: each call of a trainer's rank and of the engine, and what happens within them.
WORKERS = [
    "trainer-0/worker.load=kill",
    "trainer-1/worker.update=kill@6",
    "trainer-1/trainer.update=kill@6",
    "trainer-0/worker.sleep=kill@3",
    "trainer-1/residency.capture.slab=kill@3",
    "trainer-1/residency.release.slab=kill@4",
    "trainer-0/worker.park=kill@2",
    "trainer-1/worker.park=kill@2",
    "trainer-1/worker.wake_up=kill@2",
    "trainer-1/residency.restore.slab=kill@5",
    "trainer-0/worker.revive=kill@2",
    "trainer-1/worker.take_snapshot=kill@3",
    "trainer-0/checkpoint.open=kill@2",
    "trainer-1/checkpoint.write=kill@3",
    "trainer-1/checkpoint.fsync-file=kill@2",
    "trainer-1/weights.send.tensor=kill@20",
    "engine-0/worker.begin_update=kill@3",
    "engine-0/worker.load_parcel=kill@3",
    "engine-0/worker.weight_checksums=kill@3",
    "engine-0/worker.publish=kill@3",
    "engine-0/worker.generate=kill@3",
    "engine-0/worker.sleep=kill@3",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a run of ranks ü")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def whole(base: Path) -> Outcome:
    finish(base, base / "whole")
    return outcome(base / "whole")


def words(base: Path, run: Path) -> list[str]:
    return ["run", str(recipe(base, run)), *RANKS]


def finish(base: Path, run: Path) -> None:
    log = base / f"{run.name}.log"
    process = start(words(base, run), log)
    process.join(LIMIT)
    assert process.exitcode == 0, log.read_text()[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("point", DRIVER)
def test_a_driver_killed_at_a_named_point_leaves_a_run_that_ends_as_one_never_killed(
    base: Path, whole: Outcome, point: str
) -> None:
    run, log = base / f"driver {point}", base / f"driver {point}.log"
    process = start(words(base, run), log, point)
    process.join(LIMIT)
    assert process.exitcode == -signal.SIGKILL, log.read_text()[-3000:]
    finish(base, run)
    assert outcome(run) == whole


@pytest.mark.slow
@pytest.mark.parametrize("point", WORKERS)
def test_a_worker_killed_at_a_named_point_is_named_and_the_run_ends_as_one_never_killed(
    base: Path, whole: Outcome, point: str
) -> None:
    name = point.replace("/", " ")
    run, log = base / name, base / f"{name}.log"
    words_ = words(base, run)
    if "load=kill" in point:  # there must be something to load
        process = start([*words_, "steps=6"], log)
        process.join(LIMIT)
        assert process.exitcode == 0, log.read_text()[-3000:]
    process = start(words_, log, point)
    process.join(LIMIT)
    said = log.read_text()
    assert process.exitcode == 1, said[-3000:]
    assert f"{point.partition('/')[0]} died" in said
    finish(base, run)
    assert outcome(run) == whole


@pytest.mark.slow
def test_a_run_saved_by_two_ranks_is_resumed_by_one_and_by_four(base: Path, whole: Outcome) -> None:
    for ranks in ("1", "4"):
        run = base / f"resumed by {ranks}"
        process = start([*words(base, run), "steps=6"], base / f"{run.name}.log")
        process.join(LIMIT)
        assert process.exitcode == 0
        process = start([*words(base, run), f"trainer.ranks={ranks}"], base / f"{run.name}.log")
        process.join(LIMIT)
        assert process.exitcode == 0, (base / f"{run.name}.log").read_text()[-3000:]
        names = {file.name for file in (run / "checkpoints" / "step-00000014").glob("trainer-*")}
        assert len(names) == int(ranks)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        steps = [row["step"] for row in rows if row["kind"] == "metrics"]
        assert steps == sorted(set(steps)) == list(range(14))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_driver_saves_and_the_next_start_ends_as_if_nothing_had_been(
    base: Path, whole: Outcome, number: signal.Signals, code: int
) -> None:
    import os

    from tests.crash.test_kill_processes import wait_for_step

    run, log = base / f"stopped by {number.name}", base / f"{number.name}.log"
    process = start([*words(base, run), "checkpoint.every=0"], log)
    wait_for_step(run, 6, process)
    os.kill(process.pid or 0, number)
    process.join(LIMIT)
    assert process.exitcode == code, log.read_text()[-3000:]
    assert [p for p in (run / "checkpoints").iterdir() if p.name.startswith("step-")]
    finish(base, run)
    assert outcome(run) == whole
