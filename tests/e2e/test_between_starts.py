"""What becomes of a run folder between two starts, or of its disk in the middle of one (real processes).

The next start ends as a run that nothing had happened to, or says what is in the way.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.small_run import Outcome, outcome, prepare, recipe, start
from tests.e2e.test_bad_input import ended

LIMIT = 90.0


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("between two starts ü")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def whole(base: Path) -> Outcome:
    code, text = ended(["run", str(recipe(base, base / "whole"))], base / "whole.log")
    assert code == 0, text
    return outcome(base / "whole")


@pytest.fixture(scope="module")
def killed(base: Path) -> Path:
    """A run that died after its third checkpoint."""
    run = base / "killed"
    process = start(["run", str(recipe(base, run))], base / "killed.log", "checkpoint.rename=kill@4")
    process.join(LIMIT)
    assert (run / "checkpoints" / "step-00000009" / "manifest.json").exists()
    return run


def garbled(path: Path) -> None:
    path.write_bytes(os.urandom(3000))


def torn_at_the_end(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b'{"kind":"metrics","step":11,"po')


def one_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def of_another_shape(path: Path) -> None:
    path.write_text('{"finished": true, "steps": "many", "starts": 5, "kind": "checkpoint", "step": 1}\n')


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("manifest.json", garbled),
        ("manifest.json", of_another_shape),
        ("summary.json", garbled),
        ("summary.json", of_another_shape),
        ("attempt", garbled),
        ("attempt", Path.unlink),
        ("metrics.jsonl", torn_at_the_end),
        ("events.jsonl", of_another_shape),
        ("events.jsonl", Path.unlink),
        ("checkpoints/step-00000009/trainer-00000-of-00001.safetensors", one_bit),
        ("checkpoints/step-00000009/state.json", of_another_shape),
        ("checkpoints/step-00000009/manifest.json", Path.unlink),
    ],
)
def test_a_folder_that_was_harmed_between_two_starts_ends_as_one_that_was_not(
    base: Path, whole: Outcome, killed: Path, name: str, harm: Callable[[Path], None]
) -> None:
    run = base / f"{name.replace('/', ' ')} {harm.__name__}"
    shutil.copytree(killed, run)
    harm(run / name)
    code, text = ended(["run", str(recipe(base, run))], base / f"{run.name}.log")
    assert code == 0, text
    assert "Traceback" not in text
    assert outcome(run) == whole


def test_a_full_disk_under_the_numbers_stops_the_run_and_none_of_them_is_missing_in_the_end(
    base: Path, whole: Outcome, killed: Path
) -> None:
    run, log = base / "full metrics", base / "full metrics.log"
    shutil.copytree(killed, run)
    lines = (run / "metrics.jsonl").rename(run / "kept")
    (run / "metrics.jsonl").symlink_to("/dev/full")
    code, text = ended(["run", str(recipe(base, run))], log)
    assert code == 1, text
    assert "cannot record to jsonl" in text
    assert "No space left on device" in text
    assert "start the same command again" in text
    assert "Traceback" not in text
    assert not (run / "checkpoints" / "step-00000012").exists()
    (run / "metrics.jsonl").unlink()
    lines.rename(run / "metrics.jsonl")
    assert ended(["run", str(recipe(base, run))], log)[0] == 0
    assert outcome(run) == whole


def test_dumped_rollouts_that_cannot_be_written_stop_the_run_and_none_is_missing_in_the_end(
    base: Path, whole: Outcome
) -> None:
    run, log = base / "full dump", base / "full dump.log"
    words = ["run", str(recipe(base, run))]
    code, text = ended(words, log, "rollout.dump.write=disk-full@3")
    assert code == 1, text
    assert "cannot write rollouts of step 6" in text
    assert "Traceback" not in text
    assert ended(words, log)[0] == 0
    assert outcome(run) == whole


def test_an_export_that_failed_is_made_by_the_next_start(base: Path, whole: Outcome, killed: Path) -> None:
    run, log = base / "no export", base / "no export.log"
    shutil.copytree(killed, run)
    words = ["run", str(recipe(base, run))]
    code, text = ended(words, log, "export.rename=disk-full")
    assert code == 1, text
    assert "cannot export to" in text
    assert json.loads((run / "summary.json").read_text())["finished"] is False
    code, text = ended(words, log)
    assert code == 0, text
    assert outcome(run) == whole


def test_a_page_that_cannot_be_written_is_said_and_written_by_the_next_start(base: Path, killed: Path) -> None:
    run, log = base / "no page", base / "no page.log"
    shutil.copytree(killed, run)
    (run / "report.html").mkdir(parents=True)
    words = ["run", str(recipe(base, run))]
    code, text = ended(words, log)
    assert code == 1, text
    assert "cannot write the summary and the page" in text
    assert "Traceback" not in text
    (run / "report.html").rmdir()
    code, text = ended(words, log)
    assert code == 0, text
    assert "nothing to do" in text
    assert (run / "report.html").is_file()


def test_a_run_told_to_end_before_its_checkpoint_does_no_step_and_names_the_export_after_what_it_holds(
    base: Path, whole: Outcome, killed: Path
) -> None:
    run, log = base / "fewer steps", base / "fewer steps.log"
    shutil.copytree(killed, run)
    code, text = ended(["run", str(recipe(base, run)), "steps=7"], log)
    assert code == 0, text
    assert [path.name for path in (run / "export").iterdir()] == ["step-00000009"]
    assert json.loads((run / "summary.json").read_text())["steps"] == 9
    assert ended(["run", str(recipe(base, run))], log)[0] == 0
    assert outcome(run) == whole


def test_a_budget_too_small_is_refused_before_the_first_supervised_step(base: Path) -> None:
    run, log = base / "small budget", base / "small budget.log"
    code, text = ended(["run", str(recipe(base, run)), "residency.offload=auto", "residency.budget=1 MiB"], log)
    assert code == 2, text
    assert "raise residency.budget" in text
    assert not (run / "checkpoints").exists()


def test_a_killed_run_ends_equal_with_everything_on_that_cuts_a_step_into_pieces(base: Path) -> None:
    words = ["trainer.minibatches=2", "trainer.recompute=true", "trainer.tokens_per_micro_batch=16"]
    words += ["trainer.dtype=bfloat16", "engine.dtype=bfloat16", "engine.max_batch=5", "checkpoint.mode=sync"]
    words += ["trainer.schedule.kind=cosine", "trainer.schedule.warm_up_steps=2", "residency.page=64 KiB"]
    one, two = base / "in pieces", base / "in pieces, killed"
    assert ended(["run", str(recipe(base, one)), *words], base / "pieces.log")[0] == 0
    process = start(["run", str(recipe(base, two)), *words], base / "pieces killed.log", "trainer.update=kill@15")
    process.join(LIMIT)
    assert process.exitcode == -signal.SIGKILL
    code, text = ended(["run", str(recipe(base, two)), *words], base / "pieces killed.log")
    assert code == 0, text
    assert outcome(two) == outcome(one)
