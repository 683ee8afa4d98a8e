"""`tidemill ckpt convert` (tidemill.cli.ckpt_convert): words, exit codes, and what a run can start from."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.cli.conftest import Ckpt

from tidemill.testing.tiny import make_tiny_model


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model folder as it was before safetensors."""
    base = make_tiny_model(tmp_path / "base", hidden=32, layers=1, heads=2, kv_heads=2)
    folder = tmp_path / "old model"
    shutil.copytree(base, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def test_it_makes_a_folder_that_a_run_can_be_checked_with(source: Path, ckpt: Ckpt, tmp_path: Path) -> None:
    assert ckpt("convert", "--from", "hf", source, "--out", tmp_path / "new", "--json") == 0
    told = ckpt.told
    assert told == {"folder": str(tmp_path / "new"), "prefix": "", "tensors": told["tensors"], "notices": []}
    made, base = load_file(tmp_path / "new" / "model.safetensors"), load_file(tmp_path / "base" / "model.safetensors")
    assert all(torch.equal(made[name], base[name]) for name in base) and len(made) == told["tensors"]
    assert ckpt("convert", "--from", "hf", source, "--out", tmp_path / "new") == 2
    assert "it is there already" in ckpt.err


def test_it_says_what_it_found_and_left_out(source: Path, ckpt: Ckpt, tmp_path: Path) -> None:
    weights = load_file(tmp_path / "base" / "model.safetensors")
    torch.save({**{f"net.{name}": w for name, w in weights.items()}, "x": torch.zeros(1)}, source / "pytorch_model.bin")
    (source / "tokenizer.json").unlink()
    words = ("convert", "--from", "hf", source, "--out", tmp_path / "new", "--dtype", "bfloat16")
    assert ckpt(*words, "--prefix", "other") == 1
    assert "name another --base or --prefix" in ckpt.err and not (tmp_path / "new").exists()
    assert ckpt(*words) == 0
    lines = ckpt.out.splitlines()
    assert lines[0] == "note: 1 tensors belong to no part of the model: x"
    assert lines[1].startswith("note: there is no tokenizer in the base")
    assert lines[2].endswith(f"found under 'net.' converted to {tmp_path / 'new'}")
    assert json.loads((tmp_path / "new" / "config.json").read_text())["dtype"] == "bfloat16"


def test_wrong_words_and_folders_end_with_2(source: Path, ckpt: Ckpt, tmp_path: Path) -> None:
    assert ckpt("convert", "--from", "dcp", source, "--out", tmp_path / "new") == 2
    assert "with --base" in ckpt.err
    for words in (["--from", "megatron"], []):
        with pytest.raises(SystemExit) as ended:
            ckpt("convert", *words, source, "--out", tmp_path / "new")
        assert ended.value.code == 2
