"""`checkpoint.at_epoch_end` and `checkpoint.keep_best` in a whole run: its data, its recorder, its folder."""

import json
from pathlib import Path

import pytest
from tests.crash.small_run import STEPS, prepare, recipe

from tidemill.checkpoint.catalog import entries
from tidemill.cli.main import main
from tidemill.recorders.recorded import RecordedNumber

WORDS = ["--quiet", "checkpoint.every=0", "checkpoint.at_epoch_end=true", "checkpoint.export=false", "eval.every=0"]


def durable(run: Path) -> list[int]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [line["checkpoint_step"] for line in lines if line["kind"] == "checkpoint" and line["status"] == "durable"]


def steps(run: Path) -> list[int]:
    return [entry.step for entry in entries(run / "checkpoints")]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saves by settings")
    prepare(folder)
    return folder


def test_ends_of_epochs_are_saved_and_the_best_of_them_is_kept(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = base / "run"
    words = ["run", str(recipe(base, run)), *WORDS, "checkpoint.keep_last=1", "checkpoint.keep_best=reward/mean"]
    assert main(words) == 0
    # 13 rows: the warm-up takes 8 a step and ends epochs at steps 2 and 4, then 3 prompts a step, at steps 9 and 13.
    assert durable(run) == [2, 4, 9, 13, STEPS]
    values = RecordedNumber(run / "metrics.jsonl", "reward/mean").values()
    assert set(values) == set(range(4, STEPS))
    best = max((4, 9, 13), key=lambda step: (values[step], step))
    assert steps(run) == sorted({best, STEPS})
    capsys.readouterr()
    assert main(["ckpt", "ls", str(run), "--json"]) == 0
    kept = {row["step"]: row["kept"] for row in json.loads(capsys.readouterr().out)["checkpoints"]}
    assert kept == {best: f"the best by reward/mean ({values[best]:g})", STEPS: "the newest"}
    assert main([*words, f"steps={STEPS + 4}"]) == 0
    # 42 prompts are behind step 18: the third epoch ends at step 17.
    assert durable(run) == [2, 4, 9, 13, STEPS, 17, 18]
    later = RecordedNumber(run / "metrics.jsonl", "reward/mean").values()
    best = max((best, STEPS, 17), key=lambda step: (later[step], step))
    assert steps(run) == sorted({best, 18})


def test_a_name_that_is_not_recorded_is_told_and_only_the_last_stay(base: Path) -> None:
    run = base / "other"
    words = ["run", str(recipe(base, run)), *WORDS, "checkpoint.keep_last=1", "checkpoint.keep_best=reward/means"]
    assert main(words) == 0
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (told,) = [line["text"] for line in lines if line["kind"] == "notice" and "keep_best" in line["text"]]
    assert "nothing of that name was recorded up to step 2" in told and "batch/rows" in told
    assert steps(run) == [STEPS]
