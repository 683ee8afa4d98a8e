"""A disk that is full in the middle of a file, read-only, or holds on to what shall go: with real file systems.

They are mounted, where that is allowed, under one folder of a run; what else it writes lies elsewhere.
"""

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.checkpoint.real_runs import STOPPED, checkpoint_of, notices, started, whole_steps
from tests.crash.small_run import STEPS, Outcome, outcome, prepare
from tests.e2e.small_disk import small_disk
from tidemill.faults import calling


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("disks")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def whole(base: Path) -> Outcome:
    assert started(base, base / "whole") == 0
    return outcome(base / "whole")


@pytest.fixture(scope="module")
def begun(base: Path) -> Path:
    """A run that was stopped after its second checkpoint by schedule."""
    assert started(base, base / "begun", faults="weights.publish=stop@4") == STOPPED
    assert checkpoint_of(base / "begun", 6).is_dir()
    return base / "begun"


def once(call: Callable[[], None]) -> Callable[[], None]:
    calls = iter([call])
    return lambda: next(calls, lambda: None)()


def half_done(run: Path) -> list[str]:
    return [path.name for path in (run / "checkpoints").iterdir() if path.name.endswith((".tmp", ".trash"))]


@pytest.mark.parametrize(
    ("stage", "leave"), [("checkpoint.open", 64 << 10), ("checkpoint.state", 4096), ("checkpoint.manifest", 4096)]
)
def test_b08_a_disk_that_fills_up_in_the_middle_of_a_file_leaves_the_older_ones_and_the_next_start_ends_equal(
    base: Path, whole: Outcome, begun: Path, stage: str, leave: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """B08: of tensors, state and manifest."""
    run = base / f"full {stage}"
    shutil.copytree(begun, run)
    before = whole_steps(run)
    with small_disk(run / "checkpoints") as disk:
        with calling(stage, once(lambda: disk.fill(leave=leave))):
            assert started(base, run) == 1
        error = capsys.readouterr().err
        assert f"in {run / 'checkpoints'}: it needs " in error and "the disk is full" in error, error
        assert whole_steps(run) == before and not half_done(run)
        disk.free()
        assert started(base, run) == 0
        assert outcome(run) == whole


def test_b08_a_run_that_may_go_on_with_a_full_disk_says_so_and_saves_when_there_is_room_again(
    base: Path, whole: Outcome, begun: Path
) -> None:
    """B08: by option it goes on."""
    run = base / "lives with it"
    shutil.copytree(begun, run)
    filled: list[int] = []
    with small_disk(run / "checkpoints") as disk:

        def fill() -> None:
            filled.append(1)
            disk.fill(leave=64 << 10)

        def free() -> None:
            if filled:
                filled.clear()
                disk.free()

        with calling("checkpoint.mkdir", once(fill)), calling("weights.publish", free):
            assert started(base, run, "checkpoint.on_failure=continue", "checkpoint.mode=sync") == 0
        told = [text for text in notices(run) if "the run goes on because checkpoint.on_failure is continue" in text]
        assert len(told) == 1 and "cannot save step 9" in told[0] and str(run / "checkpoints") in told[0]
        assert whole_steps(run) == [12, STEPS]
        assert outcome(run) == whole


def test_room_is_looked_for_beforehand_and_the_message_says_how_much_is_needed(
    base: Path, begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = base / "no room"
    shutil.copytree(begun, run)
    before = whole_steps(run)
    with small_disk(run / "checkpoints") as disk:
        disk.fill(leave=256 << 10)
        assert started(base, run) == 1
        error = capsys.readouterr().err
        assert "it needs" in error and "are free there" in error and "bytes and a margin" in error, error
        assert whole_steps(run) == before and not half_done(run)


@pytest.mark.parametrize(("stage", "leave"), [("export.open", 64 << 10), ("export.text", 64)])
def test_a_disk_that_fills_up_in_the_middle_of_an_export_leaves_none_and_every_checkpoint(
    base: Path, whole: Outcome, stage: str, leave: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run = base / f"full {stage}"
    shutil.copytree(base / "whole", run)
    shutil.rmtree(run / "export")
    with small_disk(run / "export") as disk:
        with calling(stage, once(lambda: disk.fill(leave=leave))):
            assert started(base, run) == 1
        error = capsys.readouterr().err
        assert "cannot export to" in error and "full" in error, error
        assert [path for path in (run / "export").iterdir() if path.is_dir()] == []
        assert whole_steps(run)[-1] == STEPS
        disk.free()
        assert started(base, run) == 0
        assert outcome(run) == whole


def test_b16_a_folder_that_is_read_only_is_found_before_the_first_step_and_names_itself(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B16: though the first save would come after a thousand steps."""
    for name, words in (("checkpoints", "cannot keep checkpoints in"), ("export", "cannot export to")):
        run = base / f"read-only {name}"
        with small_disk(run / name) as disk:
            disk.protect(read_only=True)
            assert started(base, run, "checkpoint.every=1000") == 1
            error = capsys.readouterr().err
            assert words in error and str(run / name) in error and "Read-only file system" in error, error
            assert not checkpoint_of(run, 3).exists()


def test_a_disk_that_becomes_read_only_in_a_save_stops_the_run_and_what_it_left_is_in_nobodys_way(
    base: Path, whole: Outcome, begun: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = base / "becomes read-only"
    shutil.copytree(begun, run)
    before = whole_steps(run)
    with small_disk(run / "checkpoints") as disk:
        with calling("checkpoint.state", once(lambda: disk.protect(read_only=True))):
            assert started(base, run) == 1
        error = capsys.readouterr().err
        assert "Read-only file system" in error and "what was written is still in" in error, error
        assert whole_steps(run) == before and half_done(run)
        disk.protect(read_only=False)
        assert started(base, run) == 0
        assert outcome(run) == whole
        assert not half_done(run)


def test_b05_an_old_checkpoint_that_somebody_holds_is_warned_of_stays_and_goes_when_it_can(
    base: Path, whole: Outcome, begun: Path
) -> None:
    """B05: a mount point, whose name nobody can change."""
    run = base / "held"
    shutil.copytree(begun, run)
    oldest = whole_steps(run)[0]
    held = checkpoint_of(run, oldest)
    kept = [f"step-{step:08d}" for step in (oldest, 12, STEPS)]
    with held_open(held):
        assert started(base, run) == 0
        assert any(f"cannot delete the old checkpoint {held}" in text for text in notices(run))
        assert outcome(run) == whole
        assert sorted(path.name for path in (run / "checkpoints").iterdir()) == kept
    assert started(base, run, f"steps={STEPS + 3}") == 0
    assert whole_steps(run) == [STEPS + 1, STEPS + 3]


@contextlib.contextmanager
def held_open(folder: Path) -> Iterator[None]:
    """A mount point has a name that nobody can change."""
    try:
        subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no leave to mount a file system here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)
