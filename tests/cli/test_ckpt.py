"""`tidemill ckpt ls | verify | export`.

Modules: tidemill.cli.ckpt, tidemill.cli.ckpt_list, tidemill.cli.ckpt_export, tidemill.cli.ckpt_found,
tidemill.cli.ckpt_table, tidemill.cli.ckpt_arguments, tidemill.cli.progress.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.conftest import Ckpt, SavedRun
from transformers import AutoModelForCausalLM, Qwen3Config

from tidemill.app.identity import model_identity, tokenizer_identity
from tidemill.checkpoint.manifest import Manifest
from tidemill.cli import ckpt_list

CONFIG = Qwen3Config(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A tiny model and its folder."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "base"
    built = AutoModelForCausalLM.from_config(CONFIG)
    built.save_pretrained(folder)
    return built.eval(), folder


@pytest.fixture
def model(base: tuple[Any, Path]) -> Any:
    return base[0]


@pytest.fixture(params=[1, 3])
def run(tmp_path: Path, base: tuple[Any, Path], request: pytest.FixtureRequest) -> SavedRun:
    """Checkpoints of steps 2, 4 and 6 of that model, by one rank and by three."""
    made = SavedRun(tmp_path / "ein run ü", base[1])
    arrays = {f"model/{name}": tensor.detach().numpy() for name, tensor in base[0].named_parameters()}
    for step in (2, 4, 6):
        made.save(step, arrays, ranks=request.param)
    return made


def test_ls_says_step_age_size_state_and_why_each_is_kept(run: SavedRun, ckpt: Ckpt) -> None:
    run.damage(4)
    run.path(5).mkdir()
    assert ckpt("ls", run.folder) == 0
    lines = ckpt.out.splitlines()
    assert lines[0].split() == ["step", "age", "size", "complete", "verified", "why", "kept"]
    rows = {line.split()[0]: line for line in lines[1:]}
    assert rows["2"].endswith("yes       yes       goes at the next save")
    assert rows["4"].endswith("yes       no        a multiple of 4")
    assert rows["5"].endswith("no        no        not whole: never deleted")
    assert rows["6"].endswith("yes       yes       the newest")
    assert "step-00000005: manifest.json is missing" in lines
    assert any(line.startswith("step-00000004: ") for line in lines)


def test_ls_as_json_can_be_read_by_a_program(run: SavedRun, ckpt: Ckpt) -> None:
    assert ckpt("ls", run.folder, "--json") == 0
    rows = ckpt.told["checkpoints"]
    assert [row["step"] for row in rows] == [2, 4, 6] and all(row["verified"] and row["bytes"] > 4096 for row in rows)


def test_ls_names_the_best_by_what_the_run_recorded(run: SavedRun, ckpt: Ckpt) -> None:
    manifest = run.path(6) / "manifest.json"
    told = Manifest.read(manifest)
    kept = {"keep_last": 1, "keep_every": 0, "keep_best": "-policy/loss"}
    manifest.write_bytes(type(told)(**{**vars(told), "retention": kept}).to_bytes())
    lines = [{"kind": "metrics", "step": step, "policy/loss": loss} for step, loss in ((0, -9), (2, 0.25), (4, 0.5))]
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert ckpt("ls", run.folder, "--json") == 0
    assert [row["kept"] for row in ckpt.told["checkpoints"]] == [
        "the best by -policy/loss (0.25)",
        "goes at the next save",
        "the newest",
    ]


def test_verify_ends_with_0_only_when_all_hold(run: SavedRun, ckpt: Ckpt) -> None:
    assert ckpt("verify", run.folder) == 0
    assert ckpt.out.count("holds") == 3
    run.damage(4)
    assert ckpt("verify", run.folder) == 1
    assert "step-00000004: " in ckpt.out and ckpt.out.count("holds") == 2
    assert ckpt("verify", run.folder, "--step", 6) == 0
    assert ckpt("verify", run.folder, "--step", 4, "--json") == 1
    assert ckpt.told["holds"] is False


@pytest.mark.parametrize("action", ["ls", "verify"])
def test_a_checkpoint_that_the_run_deletes_meanwhile_is_not_called_broken(
    run: SavedRun, ckpt: Ckpt, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    def deleted(entry: Any, **options: Any) -> Any:
        if entry.step == 2 and entry.path.is_dir():
            entry.path.rename(entry.path.with_name("step-00000002.1.trash"))
        return problems_of(entry, **options)

    problems_of = ckpt_list.problems_of
    monkeypatch.setattr(ckpt_list, "problems_of", deleted)
    assert ckpt(action, run.folder, "--json") == 0
    assert [row["step"] for row in ckpt.told["checkpoints"]] == [4, 6]
    run.path(2).with_name("step-00000002.1.trash").rename(run.path(2))
    assert ckpt("verify", run.path(2)) == 1 and "step-00000002: it was deleted meanwhile" in ckpt.out


@pytest.mark.parametrize("action", ["ls", "verify", "inspect", "export"])
def test_a_file_that_leads_nowhere_is_what_is_missing(run: SavedRun, ckpt: Ckpt, tmp_path: Path, action: str) -> None:
    for path in run.path(6).glob("*.safetensors"):
        path.unlink()
        path.symlink_to(tmp_path / "moved")
    words = ["--out", tmp_path / "out"] if action == "export" else []
    assert ckpt(action, run.path(6), *words) == (0 if action == "ls" else 1)
    assert "missing" in ckpt.out + ckpt.err


@pytest.mark.parametrize("action", ["ls", "verify", "inspect", "export", "prune", "diff"])
def test_what_holds_no_checkpoints_is_a_usage_error(tmp_path: Path, ckpt: Ckpt, action: str) -> None:
    words = {"export": ["--out", tmp_path / "out"], "diff": [tmp_path]}.get(action, [])
    assert ckpt(action, tmp_path, *words) == 2
    assert f"no checkpoints in {tmp_path / 'checkpoints'}; name a run's folder (run.dir)" in ckpt.err
    (tmp_path / "a file").write_text("")
    for name, told in (("a file", "is no folder"), ("none", "is not there"), ("x" * 300, "is not there")):
        assert ckpt(action, tmp_path / name, *words) == 2
        assert f"{told}; name a run's folder" in ckpt.err
    (tmp_path / "checkpoints").mkdir()
    assert ckpt(action, tmp_path, *words) == 2
    assert "the run has not saved any yet" in ckpt.err


def test_a_step_that_is_not_there_is_answered_with_those_that_are(run: SavedRun, ckpt: Ckpt) -> None:
    assert ckpt("verify", run.folder, "--step", 5) == 2
    assert "no checkpoint of step 5 in " in ckpt.err and "; there are 2, 4, 6" in ckpt.err
    assert ckpt("verify", run.path(4), "--step", 6) == 2
    assert "there is 4" in ckpt.err


def test_a_run_may_be_named_in_many_ways(
    run: SavedRun, ckpt: Ckpt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(run.folder)
    shutil.copytree(run.path(4), tmp_path / "my copy")
    run.path(6).rename(run.path(6).with_name("step-00000006.aside-2"))
    monkeypatch.chdir(run.path(2))
    ways = {
        tmp_path / "link": [2, 4],
        run.folder / "checkpoints": [2, 4],
        tmp_path / "link" / "checkpoints" / "step-00000004": [4],
        run.path(6).with_name("step-00000006.aside-2"): [6],
        tmp_path / "my copy": [4],
        Path(): [2],
        Path("../.."): [2, 4],
    }
    for path, steps in ways.items():
        assert ckpt("verify", path, "--json") == 0, path
        assert [row["step"] for row in ckpt.told["checkpoints"]] == steps, path
    assert ckpt("ls", tmp_path / "my copy", "--json") == 0
    assert ckpt.told["checkpoints"][0]["kept"] == "in no run's care: never deleted"
    assert ckpt("ls", run.path(2), "--json") == 0
    assert ckpt.told["checkpoints"][0]["kept"] == "goes at the next save"


def test_export_takes_the_newest_whole_one(run: SavedRun, ckpt: Ckpt, model: Any, tmp_path: Path) -> None:
    run.damage(6)
    assert ckpt("export", run.folder, "--out", tmp_path / "out", "--json") == 0
    assert ckpt.told == {"export": str(tmp_path / "out"), "step": 4}
    assert "step-00000006 is not whole and is passed over" in ckpt.err
    ids = torch.tensor([[1, 2, 3]])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert ckpt("export", run.folder, "--out", tmp_path / "out") == 2
    assert "it is there already" in ckpt.err


def test_export_warns_when_the_base_is_no_longer_what_the_run_began_with(
    run: SavedRun, ckpt: Ckpt, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(run.base, base)
    identity = {"model": model_identity(base), "tokenizer": tokenizer_identity(base)}
    path = run.path(6) / "manifest.json"
    told = Manifest.read(path)
    path.write_bytes(replace(told, identity=identity, settings={"settings": {"model": str(base)}}).to_bytes())
    assert ckpt("export", run.folder, "--out", tmp_path / "one") == 0 and "has another" not in ckpt.err
    (base / "tokenizer_config.json").write_text("{}")
    assert ckpt("export", run.folder, "--out", tmp_path / "two") == 0
    assert f"warning: {base} has another tokenizer now" in ckpt.err


def test_export_takes_a_base_that_was_moved_from_where_it_is_now(run: SavedRun, ckpt: Ckpt, tmp_path: Path) -> None:
    base = tmp_path / "moved"
    shutil.copytree(run.base, base)
    path = run.path(6) / "manifest.json"
    path.write_bytes(replace(Manifest.read(path), settings={"settings": {"model": "/gone"}}).to_bytes())
    assert ckpt("export", run.folder, "--out", tmp_path / "out") == 1 and "/gone" in ckpt.err
    assert ckpt("export", run.folder, "--out", tmp_path / "out", "--base", base) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_export_of_a_damaged_step_is_refused(run: SavedRun, ckpt: Ckpt, tmp_path: Path) -> None:
    run.damage(6)
    for place in ((run.folder, "--step", 6), (run.path(6),)):
        assert ckpt("export", *place, "--out", tmp_path / "out") == 1
        assert "cannot export " in ckpt.err and "step-00000006" in ckpt.err and "take another step" in ckpt.err
    assert ckpt("export", run.folder, "--step", 4, "--out", tmp_path / "out", "--dtype", "bfloat16") == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    for step in (2, 4):
        run.damage(step)
    assert ckpt("export", run.folder, "--out", tmp_path / "other") == 1
    assert "none of its 3 checkpoints is whole" in ckpt.err


@pytest.mark.parametrize(
    "words", [["ls"], ["verify"], ["inspect", "--tensors", "--statistics"], ["prune", "--dry-run"]]
)
def test_looking_needs_no_torch(run: SavedRun, words: list[str]) -> None:
    assert importlib.util.find_spec("torch") is not None
    code = (
        "import sys; from tidemill.cli.main import main;"
        f"code = main(['ckpt', {words[0]!r}, {str(run.folder)!r}, *{words[1:]!r}]);"
        "sys.exit(code or 'torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize("words", [["ls"], ["ls", "--json"], ["verify"], ["inspect"], ["prune", "--dry-run"]])
def test_a_reader_that_goes_away_is_told_by_the_exit_code(run: SavedRun, words: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tidemill", "ckpt", words[0], str(run.folder), *words[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert (process.stderr.read(), process.wait(60)) == (b"", 141)
    process.stderr.close()
