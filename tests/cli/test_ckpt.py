import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.pieces import shards_of
from transformers import AutoModelForCausalLM, Qwen3Config

from tidemill.checkpoint.commit import Committer
from tidemill.checkpoint.staged import stage
from tidemill.cli.ckpt import main
from tidemill.contracts.checkpoint import Snapshot
from tidemill.contracts.state import Cursor, RunState
from tidemill.errors import CheckpointError, ConfigError

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


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """A tiny model, its base folder beside it."""
    torch.manual_seed(0)
    built = AutoModelForCausalLM.from_config(CONFIG)
    built.save_pretrained(tmp_path / "base")
    return built.eval()


@pytest.fixture(params=[1, 3])
def run(tmp_path: Path, model: Any, request: pytest.FixtureRequest) -> Path:
    """A run folder with checkpoints of steps 2, 4 and 6 of that model, by one rank and by three."""
    folder = tmp_path / "ein run ü"
    (folder / "checkpoints").mkdir(parents=True)
    arrays = {f"model/{name}": tensor.detach().numpy() for name, tensor in model.named_parameters()}
    shards = shards_of(arrays, request.param)
    committer = Committer(
        folder=folder / "checkpoints",
        attempt=1,
        identity={},
        settings={"settings": {"model": str(tmp_path / "base")}, "origins": {}},
        retention={"keep_last": 1, "keep_every": 4},
    )
    for step in (2, 4, 6):
        state = RunState(step=step, attempt=1, seed=0, cursor=Cursor(), warm_up_cursor=Cursor())
        committer.commit(stage(state, {"trainer": Snapshot(shards=shards)}), lambda count: None)
    return folder


def call(run: Path, action: str, **options: Any) -> int:
    defaults = {"step": None, "out": None, "dtype": "auto", "json": False}
    return main(argparse.Namespace(run=run, action=action, **defaults | options))


def damage(run: Path, step: int) -> None:
    path = next((run / "checkpoints" / f"step-{step:08d}").glob("trainer-00000-of-*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_ls_says_step_age_size_state_and_why_each_is_kept(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run, 4)
    (run / "checkpoints" / "step-00000005").mkdir()
    assert call(run, "ls") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "age", "size", "complete", "verified", "why", "kept"]
    rows = {line.split()[0]: line for line in lines[1:]}
    assert rows["2"].endswith("yes       yes       goes at the next save")
    assert rows["4"].endswith("yes       no        a multiple of 4")
    assert rows["5"].endswith("no        no        not whole: never deleted")
    assert rows["6"].endswith("yes       yes       the newest")
    assert "step-00000005: manifest.json is missing" in lines
    assert any(line.startswith("step-00000004: the checksum of model/") for line in lines)


def test_ls_as_json_can_be_read_by_a_program(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(run, "ls", json=True) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [row["step"] for row in rows] == [2, 4, 6] and all(row["verified"] and row["bytes"] > 4096 for row in rows)


def test_verify_ends_with_0_only_when_all_hold(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(run, "verify") == 0
    assert capsys.readouterr().out.count("holds") == 3
    damage(run, 4)
    assert call(run, "verify") == 1
    assert "step-00000004: the checksum of" in capsys.readouterr().out
    assert call(run, "verify", step=6) == 0
    assert call(run, "verify", step=4, json=True) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["holds"] is False


@pytest.mark.parametrize("action", ["ls", "verify", "export"])
def test_a_folder_without_checkpoints_is_a_usage_error(tmp_path: Path, action: str) -> None:
    with pytest.raises(ConfigError, match="no checkpoints in"):
        call(tmp_path, action)


def test_a_step_that_is_not_there_is_answered_with_those_that_are(run: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint of step 5 in .*; there are 2, 4, 6"):
        call(run, "verify", step=5)


def test_export_takes_the_newest_whole_one(
    run: Path, model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run, 6)
    assert call(run, "export", out=tmp_path / "out", json=True) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"export": str(tmp_path / "out"), "step": 4}
    assert "step-00000006 is not whole and is passed over" in captured.err
    ids = torch.tensor([[1, 2, 3]])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_export_of_a_damaged_step_is_refused(run: Path, tmp_path: Path) -> None:
    damage(run, 6)
    with pytest.raises(CheckpointError, match="cannot export .*the checksum of"):
        call(run, "export", step=6, out=tmp_path / "out")
    assert call(run, "export", step=4, out=tmp_path / "out", dtype="bfloat16") == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_looking_needs_no_torch(run: Path) -> None:
    assert importlib.util.find_spec("torch") is not None
    code = (
        "import argparse, sys; from pathlib import Path; from tidemill.cli.ckpt import main;"
        f"main(argparse.Namespace(run=Path({str(run)!r}), action='ls', json=True));"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
