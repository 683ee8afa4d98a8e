"""Model folders beside saves, and the trial before the first step, in whole runs of one process and of two ranks.

`checkpoint.export_every`, `checkpoint.trial`.
"""

import json
import shutil
import signal
from pathlib import Path

import pytest
from tests.app.test_export import notices
from tests.crash.small_run import STEPS, outcome, prepare, recipe, start

from tidemill.checkpoint.safetensors_file import TensorFile
from tidemill.cli.main import main
from tidemill.testing.tiny import make_tiny_model

RANKS = ["cluster.use=tidemill.testing.spawned_cluster:SpawnedClusterSettings", "trainer.ranks=2"]
BESIDE = ["checkpoint.export_every=6", "checkpoint.trial=true", "checkpoint.keep_every=3"]
LIMIT = 120.0


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports beside ü")
    prepare(folder)
    return folder


def words(base: Path, run: Path, *more: str) -> list[str]:
    return ["run", str(recipe(base, run)), "--quiet", *more]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(base: Path) -> Path:
    assert main(words(base, base / "finished", *BESIDE)) == 0
    return base / "finished"


def exports_of(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "export").iterdir())


@pytest.mark.parametrize("ranks", [[], RANKS], ids=["one process", "two ranks"])
def test_each_is_byte_for_byte_what_is_exported_of_its_checkpoint(
    base: Path, finished: Path, ranks: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = finished
    if ranks:
        run = base / "two ranks"
        assert main(words(base, run, *BESIDE, *ranks)) == 0
        assert len(list((run / "checkpoints" / "step-00000012").glob("trainer-*-of-00002.safetensors"))) == 2
    assert exports_of(run) == ["step-00000006", "step-00000012", f"step-{STEPS:08d}"]
    for name in exports_of(run):
        target = base / f"{run.name} {name}"
        assert main(["ckpt", "export", str(run), "--step", str(int(name[5:])), "--out", str(target)]) == 0
        assert files(target) == files(run / "export" / name)
    capsys.readouterr()
    other = {name: (base / "model" / name).read_bytes() for name in files(base / "model") if ".safetensors" not in name}
    assert {name: data for name, data in files(run / "export" / "step-00000006").items() if name in other} == other


def test_a_run_killed_within_an_export_leaves_none_that_is_half_and_the_next_start_makes_it(
    base: Path, finished: Path
) -> None:
    run, log = base / "killed", base / "killed.log"
    for point in ("export.write=kill", "export.rename=kill", "export.fsync-parent=kill@2"):
        process = start([word for word in words(base, run, *BESIDE) if word != "--quiet"], log, point)
        process.join(LIMIT)
        assert process.exitcode == -signal.SIGKILL, log.read_text()[-3000:]
        whole = [path for path in (run / "export").iterdir() if not path.name.startswith(".")]
        assert all(files(path) == files(finished / "export" / path.name) for path in whole)
    assert main(words(base, run, *BESIDE)) == 0
    assert exports_of(run) == exports_of(finished)
    assert files(run / "export") == files(finished / "export")
    assert outcome(run) == outcome(finished)


@pytest.mark.parametrize("on_failure", ["continue", "stop"])
def test_another_model_in_its_place_is_not_touched_and_costs_no_checkpoint(
    base: Path, finished: Path, on_failure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = base / f"in the way {on_failure}"
    shutil.copytree(base / "model", run / "export" / "step-00000006")
    before = files(run / "export" / "step-00000006")
    code = main(words(base, run, *BESIDE, f"checkpoint.on_failure={on_failure}"))
    assert files(run / "export" / "step-00000006") == before
    assert (run / "checkpoints" / "step-00000006" / "manifest.json").is_file()
    if on_failure == "continue":
        assert code == 0 and outcome(run) == outcome(finished)
        assert "step 6 is saved, but not exported" in notices(run)
        return
    said = capsys.readouterr().err
    assert code == 1 and "step 6 is saved, but not exported" in said and "move it away" in said
    shutil.rmtree(run / "export")
    assert main(words(base, run, *BESIDE)) == 0
    assert outcome(run) == outcome(finished) and files(run / "export") == files(finished / "export")


@pytest.mark.parametrize("point", ["checkpoint.write", "checkpoint.manifest", "checkpoint.rename", "export.text"])
def test_a_run_killed_within_its_trial_has_done_nothing(base: Path, point: str) -> None:
    run, log = base / f"trial {point}", base / f"trial {point}.log"
    process = start([word for word in words(base, run, *BESIDE) if word != "--quiet"], log, f"{point}=kill")
    process.join(LIMIT)
    assert process.exitcode == -signal.SIGKILL, log.read_text()[-3000:]
    assert not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").read_text()
    assert main(words(base, run, *BESIDE, "steps=6")) == 0
    assert "starting at step 0" in notices(run)
    for folder in ("checkpoints", "export"):
        assert all(path.name.startswith("step-0000000") and path.suffix == "" for path in (run / folder).iterdir())


def test_a_contradictory_generation_config_is_told_of_before_the_first_step_and_costs_nothing(
    base: Path, tmp_path: Path
) -> None:
    prepare(tmp_path)
    odd = (Path(__file__).parents[1] / "data" / "generation_config_contradictory.json").read_bytes()
    (tmp_path / "model" / "generation_config.json").write_bytes(odd)
    run = tmp_path / "run"
    assert main(words(tmp_path, run, "checkpoint.trial=true", "steps=5", "eval.every=0")) == 0
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    texts = [str(event) for event in events]
    told = next(number for number, text in enumerate(texts) if "contradicts itself" in text)
    first = next(number for number, text in enumerate(texts) if "staged" in text)
    assert told < first
    assert (run / "export" / "step-00000005" / "generation_config.json").read_bytes() == odd


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_that_learns_nothing_exports_its_base(tmp_path: Path, dtype: str) -> None:
    prepare(tmp_path)
    shutil.rmtree(tmp_path / "model")
    model = make_tiny_model(
        tmp_path / "model", hidden=32, layers=2, heads=2, kv_heads=2, tied=False, dtype=dtype  # type: ignore[arg-type]
    )  # fmt: skip
    still = ["trainer.optimizer.lr=0", "warm_up.steps=0", "checkpoint.every=1", "checkpoint.export_every=1"]
    assert main(words(tmp_path, tmp_path / "run", *still, "steps=2", "eval.every=0")) == 0
    for name in ("step-00000001", "step-00000002"):
        assert {**files(tmp_path / "run" / "export" / name), "model.safetensors": b""} == {
            **files(model),
            "model.safetensors": b"",
        }
    ours, theirs = (
        TensorFile(folder / "model.safetensors").tensors()
        for folder in (tmp_path / "run" / "export" / "step-00000002", model)
    )
    assert {name: (held.dtype, held.shape, bytes(held.data)) for name, held in ours.items()} == {
        name: (held.dtype, held.shape, bytes(held.data)) for name, held in theirs.items()
    }
