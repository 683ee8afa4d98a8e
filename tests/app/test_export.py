"""The model folder at the end of a run (`tidemill.app.export`), and what a finished folder answers."""

import json
import shutil
from pathlib import Path

import pytest
from tests.crash.small_run import STEPS, outcome, prepare, recipe

from tidemill.checkpoint.safetensors_file import TensorFile
from tidemill.checkpoint.stored import read_checkpoint, weights_of
from tidemill.cli.main import main

EXPORT = f"export/step-{STEPS:08d}"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports")
    prepare(folder)
    return folder


@pytest.fixture(scope="module")
def finished(base: Path) -> Path:
    assert main(["run", str(recipe(base, base / "finished")), "--quiet"]) == 0
    return base / "finished"


def copy_of(finished: Path, name: str) -> tuple[Path, list[str]]:
    run = finished.with_name(name)
    shutil.copytree(finished, run)
    return run, ["run", str(recipe(finished.parent, run)), "--quiet"]


def notices(run: Path) -> str:
    return "\n".join(line for line in (run / "events.jsonl").read_text().splitlines() if '"notice"' in line)


def test_an_export_that_was_written_before_its_start_died_is_kept(finished: Path) -> None:
    run, words = copy_of(finished, "died after the export")
    (run / "summary.json").unlink()
    written = (run / EXPORT / "model.safetensors").stat().st_mtime_ns
    assert main(words) == 0
    assert (run / EXPORT / "model.safetensors").stat().st_mtime_ns == written
    assert "holds this very model already" in notices(run)
    assert outcome(run) == outcome(finished)


def test_a_folder_that_holds_another_model_is_neither_taken_for_the_export_nor_overwritten(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, words = copy_of(finished, "another model")
    (run / "summary.json").unlink()
    file = run / EXPORT / "model.safetensors"
    other = bytearray(file.read_bytes())
    other[-1] ^= 1
    file.write_bytes(other)
    assert main(words) == 1
    assert "holds another model or dtype than this run's; move it away" in capsys.readouterr().err
    assert file.read_bytes() == other
    assert json.loads((run / "summary.json").read_text())["finished"] is False
    shutil.rmtree(run / "export")
    assert main(words) == 0
    assert outcome(run) == outcome(finished)


def test_an_export_that_cannot_be_written_is_found_before_the_first_step(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = base / "no export"
    run.mkdir()
    (run / "export").write_text("in the way")
    assert main(["run", str(recipe(base, run)), "--quiet", "checkpoint.trial=true"]) == 1
    assert "checkpoint.export = false" in capsys.readouterr().err
    assert not (run / "metrics.jsonl").exists()
    assert main(["run", str(recipe(base, run)), "--quiet", "checkpoint.export=false", "steps=5"]) == 0


def test_a_run_told_to_end_before_its_checkpoint_says_so_and_does_nothing(finished: Path) -> None:
    run, words = copy_of(finished, "past the end")
    (run / "summary.json").unlink()
    assert main([*words, "steps=10"]) == 0
    assert f"the checkpoint is at step {STEPS}, past steps = 10" in notices(run)
    assert outcome(run) == outcome(finished)


@pytest.mark.parametrize(("word", "name"), [("run.seed=5", "seed"), ("warm_up.steps=3", "warm_up"), ("data", "data")])
def test_a_finished_folder_answers_only_to_its_own_run(
    finished: Path, word: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, words = copy_of(finished, f"asked with {name}")
    if word == "data":
        rows = run / "rows.jsonl"
        rows.write_text((finished.parent / "rows.jsonl").read_text() + '{"prompt": "87654321>", "label": "12345678"}\n')
        word = f"data.prompts={rows}"
    before = (run / "summary.json").read_bytes()
    assert main([*words, word]) == 2
    assert f"its {name} is " in capsys.readouterr().err
    assert (run / "summary.json").read_bytes() == before
    assert main([*words, word, f'checkpoint.accept=["{name}"]']) == 0
    assert main(words) == 0


def test_a_run_of_two_ranks_exports_its_last_checkpoint(base: Path) -> None:
    run = base / "two ranks"
    ranks = ["cluster.use=tidemill.testing.spawned_cluster:SpawnedClusterSettings", "trainer.ranks=2"]
    words = ["run", str(recipe(base, run)), "--quiet", *ranks, "steps=2", "warm_up.steps=1", "eval.every=0"]
    assert main(words) == 0
    last = run / "checkpoints" / "step-00000002"
    assert len(list(last.glob("trainer-*-of-00002.safetensors"))) == 2
    weights = weights_of(read_checkpoint(last, step=2))
    held = TensorFile(run / "export" / "step-00000002" / "model.safetensors").tensors()
    assert {name: bytes(tensor.data) for name, tensor in held.items()} == {
        name: bytes(tensor.data) for name, tensor in weights.items()
    }
    (run / "summary.json").unlink()
    assert main(words) == 0
    assert "holds this very model already" in notices(run)
