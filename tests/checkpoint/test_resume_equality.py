"""Runs that are stopped and go on end as one that was never stopped, in everything that they leave behind.

Losses, sample ids, tokens, log-probs, weights, moments, export, samples, and every recorded series. Chance changes the
answers and the losses: the generators of the driver and of every rank decide what comes next.
"""

import shutil
from pathlib import Path

import pytest
from tests.checkpoint.real_runs import CHANCE, RANKS, STOPPED, checkpoint_of, curves_of, notices, started, steps_of
from tests.crash.small_run import STEPS, outcome, prepare

CURVES = 'recorder.use=["tensorboard"]'
WHERE = pytest.mark.parametrize("where", ["inline", "ranks"])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("equal runs ü")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def whole(base: Path) -> dict[str, Path]:
    """A run that nobody stopped, in this process and over ranks."""
    runs = {"inline": base / "whole inline", "ranks": base / "whole ranks"}
    for where, run in runs.items():
        assert started(base, run, *words(where)) == 0
    return runs


def words(where: str) -> tuple[str, ...]:
    return (*CHANCE, CURVES) if where == "inline" else (*RANKS, *CHANCE, CURVES)


def check_equal(run: Path, other: Path) -> None:
    assert outcome(run) == outcome(other)
    assert curves_of(run) == curves_of(other)
    assert steps_of(run) == list(range(STEPS))
    assert [step for step, _ in curves_of(run)["policy/loss"]] == list(range(STEPS))


@WHERE
def test_c20_two_runs_continued_from_one_checkpoint_are_equal_and_equal_to_the_uninterrupted_one(
    base: Path, whole: dict[str, Path], where: str
) -> None:
    """C20: sampled at temperature 1, with rewards and losses that chance changes."""
    one, two = base / f"one {where}", base / f"two {where}"
    assert started(base, one, *words(where), faults="weights.publish=stop@5") == STOPPED
    assert not (one / "export").exists() or not list((one / "export").iterdir())
    shutil.copytree(one, two)
    for run in (one, two):
        assert started(base, run, *words(where)) == 0
        assert any("resuming from step-" in text for text in notices(run))
        check_equal(run, whole[where])


def test_b17_generations_that_each_resume_and_save_equal_a_run_that_was_never_stopped(
    base: Path, whole: dict[str, Path]
) -> None:
    """B17: saved, resumed, saved, resumed, saved, resumed."""
    run, resumed = base / "generations", []
    for _ in range(3):
        assert started(base, run, *words("inline"), "checkpoint.every=0", faults="weights.publish=stop@4") == STOPPED
        resumed.append(sorted(path.name for path in (run / "checkpoints").iterdir())[-1])
    assert resumed == sorted(set(resumed))
    assert started(base, run, *words("inline")) == 0
    check_equal(run, whole["inline"])


def test_c05_a_run_that_died_steps_after_its_checkpoint_makes_them_again_with_the_same_ids_and_tokens(
    base: Path, whole: dict[str, Path]
) -> None:
    """C05 and C20: what came after the checkpoint is made again, what came before is not."""
    run = base / "died later"
    assert started(base, run, *words("inline"), "steps=9") == 0
    shutil.rmtree(checkpoint_of(run, 9))
    assert steps_of(run) == list(range(9))
    assert started(base, run, *words("inline")) == 0
    assert any("resuming from step-00000006" in text for text in notices(run))
    check_equal(run, whole["inline"])
