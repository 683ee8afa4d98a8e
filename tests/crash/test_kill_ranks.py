"""A run of two ranks and an engine process: whichever process is killed, at whichever named point, it resumes equal."""

import json
import signal
from pathlib import Path

import pytest

from tests.crash.point_names import point_names
from tests.crash.small_run import Outcome, outcome, prepare, recipe, start

LIMIT = 180.0
RANKS = [
    "cluster.use=tests.crash.small_parcels:SmallParcelsSettings", "trainer.ranks=2", "residency.park_groups=always",
]  # fmt: skip

# Where a run is killed, resumed, killed again, and so on. A name with a slash is that worker's point, others are the
# driver's; `@2` is the second time that a start passes it.
CHAINS = {
    "while files of a save are written": [
        "checkpoint.mkdir@2",
        "checkpoint.state",
        "checkpoint.fsync-state@2",
        "checkpoint.manifest",
        "checkpoint.fsync-manifest",
    ],
    "while a save becomes one": [
        "checkpoint.fsync-attempt@2",
        "checkpoint.rename",
        "checkpoint.fsync-parent",
        "checkpoint.acknowledged",
        "checkpoint.retention.rename",
    ],
    "while older saves are cleared, and an export begins": [
        "checkpoint.retention.fsync",
        "checkpoint.retention.unlink",
        "export.mkdir",
        "export.open",
        "export.fsync-header",
        "trainer-1/export.write",
    ],
    "in the last moments of a run": [
        "trainer-0/export.fsync-file",
        "export.fsync-whole",
        "export.text",
        "export.fsync-text",
        "export.fsync-folder",
        "export.rename",
        "export.fsync-parent",
    ],
    "in the first moments of a start": [
        "weights.publish@4",
        "attempt.write",
        "attempt.fsync-file",
        "run-folder.write",
        "run-folder.fsync",
    ],
    "while the driver writes": [
        "rollout.dump.write@4",
        "checkpoint.probe",
        "checkpoint.fsync-probe",
        "run-folder.write@3",
        "run-folder.fsync@3",
    ],
    "a rank that begins": [
        "trainer-1/worker.stand",
        "trainer-0/groups.begin",
        "trainer-0/worker.begin",
        "trainer-1/worker.begin@2",
    ],
    "a rank that learns": [
        "trainer-1/worker.update@8",
        "trainer-0/worker.log_probs",
        "trainer-0/worker.load",
        "trainer-1/trainer.update@2",
        "trainer-0/worker.take_snapshot",
        "trainer-1/worker.take_snapshot@3",
    ],
    "a rank that falls asleep": [
        "trainer-0/worker.sleep@3",
        "trainer-1/residency.capture.slab@3",
        "trainer-1/residency.release.slab@4",
        "trainer-0/worker.park",
        "trainer-1/worker.park@2",
        "trainer-0/groups.park",
    ],
    "a rank that wakes": [
        "trainer-1/worker.wake_up@2",
        "trainer-1/residency.restore.slab@5",
        "trainer-0/worker.revive@2",
        "trainer-1/groups.begin@2",
    ],
    "a rank that saves": [
        "trainer-0/checkpoint.open@2",
        "trainer-1/checkpoint.write@2",
        "trainer-1/checkpoint.fsync-file",
        "trainer-0/checkpoint.fsync-file@2",
    ],
    "a rank that ships weights": [
        "trainer-0/worker.where",
        "trainer-1/worker.open_shipment@2",
        "trainer-1/worker.next_parcel@3",
        "trainer-0/worker.take_parcel@5",
        "trainer-1/weights.send.tensor@20",
        "trainer-0/worker.close_shipment@2",
    ],
    "an engine that takes on weights": [
        "engine-0/worker.where",
        "engine-0/worker.begin_update@2",
        "engine-0/worker.load_parcel@5",
        "engine-0/worker.weight_checksums@2",
        "engine-0/worker.publish@3",
    ],
    "an engine that answers": [
        "engine-0/worker.stand",
        "engine-0/worker.wake_up@2",
        "engine-0/worker.generate@3",
        "engine-0/worker.sleep@3",
    ],
}

# No run passes these.
_NO_POINT = "it is asked without the trainer's or the engine's gate, which is what passes points"
NEVER = {
    "worker.changes": "asked only after ranks failed differently",
    "worker.load_pretrained": "only `tidemill rollout` has no trainer to get weights from",
    "worker.abandon_shard": _NO_POINT,
    "worker.answered": _NO_POINT,
    "worker.describe": _NO_POINT,
    "worker.describe_trainer": _NO_POINT,
    "worker.dtype": _NO_POINT,
    "worker.release_snapshot": _NO_POINT,
    "worker.shard_state": _NO_POINT,
    "worker.write_shard": _NO_POINT,
    "worker.place_shard": _NO_POINT,
    "worker.compare_shard": _NO_POINT,
}


def test_every_point_of_the_program_is_one_where_a_run_is_killed() -> None:
    killed = {point.rpartition("/")[2].partition("@")[0] for chain in CHAINS.values() for point in chain}
    assert killed | NEVER.keys() == point_names()
    assert not killed & NEVER.keys()


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
@pytest.mark.parametrize("chain", CHAINS)
def test_a_run_killed_at_one_named_point_after_the_other_names_who_died_and_ends_as_one_never_killed(
    base: Path, whole: Outcome, chain: str
) -> None:
    run, log = base / chain, base / f"{chain}.log"
    for point in CHAINS[chain]:
        name, _, nth = point.partition("@")
        before = len(log.read_text()) if log.exists() else 0
        process = start(words(base, run), log, f"{name}=kill@{nth or 1}")
        process.join(LIMIT)
        said = log.read_text()[before:]
        worker, of_a_worker, _ = point.partition("/")
        assert process.exitcode == (1 if of_a_worker else -signal.SIGKILL), f"{point}: {said[-3000:]}"
        assert not of_a_worker or f"{worker} died" in said, f"{point}: {said[-3000:]}"
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
