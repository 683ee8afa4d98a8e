"""Faults of kind B that are of exports: B10, B12, B13 and B14, over whole runs."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.real_runs import SHORT, checkpoint_of, notices, started, whole_steps
from tests.residency.real_run import prepare_learning
from transformers import AutoModelForCausalLM

from tidemill.checkpoint.stored import read_checkpoint, weights_of
from tidemill.cli.main import main
from tidemill.testing.tiny import make_tiny_model

CONTRADICTION = Path(__file__).parents[1] / "data" / "generation_config_contradictory.json"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports")
    prepare_learning(folder)
    for tied in (True, False):
        make_tiny_model(folder / f"tied {tied}", hidden=32, layers=2, heads=2, kv_heads=2, tied=tied)
    make_tiny_model(folder / "bf16", hidden=32, layers=2, heads=2, kv_heads=2, dtype="bfloat16")
    return folder


def exported(run: Path) -> Path:
    return run / "export" / "step-00000002"


@pytest.mark.parametrize("tied", [True, False])
def test_b10_an_export_has_tied_weights_once_and_loads_with_every_key_and_the_trainers_values(
    base: Path, tied: bool
) -> None:
    """B10: at the end of a run, and from its checkpoint. There are no adapters and no value heads yet."""
    run = base / f"run, tied {tied}"
    assert started(base, run, f"model={base / f'tied {tied}'}", *SHORT) == 0
    assert main(["ckpt", "export", str(run), "--out", str(base / f"from disk {tied}")]) == 0
    weights = weights_of(read_checkpoint(checkpoint_of(run, 2), step=2))
    base_weights = load_file(base / f"tied {tied}" / "model.safetensors")
    assert all(bytes(weights[name].data) != value.numpy().tobytes() for name, value in base_weights.items())
    for folder in (exported(run), base / f"from disk {tied}"):
        names = [name for path in folder.glob("*.safetensors") for name in load_file(path)]
        assert ("lm_head.weight" in names) == (not tied) and len(names) == len(set(names))
        model, loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        assert not loaded["missing_keys"] and not loaded["unexpected_keys"] and not loaded["mismatched_keys"]
        for name, value in model.named_parameters():
            assert bytes(weights[name].data) == value.detach().numpy().tobytes(), name


@pytest.mark.parametrize("folder", ["tied True", "tied False", "bf16"])
def test_b12_a_run_that_learns_nothing_exports_the_base_bit_by_bit(base: Path, folder: str) -> None:
    """B12: learning rate 0; the same names, shapes and values, so that no tensor fell onto another's name."""
    run = base / f"nothing learned from {folder}"
    assert started(base, run, f"model={base / folder}", *SHORT, "trainer.optimizer.lr=0") == 0
    before, after = load_file(base / folder / "model.safetensors"), load_file(exported(run) / "model.safetensors")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype and torch.equal(value, after[name]), name


@pytest.mark.parametrize(("word", "dtype"), [("auto", "bfloat16"), ("float32", "float32")])
def test_b13_an_export_is_in_the_bases_precision_or_in_the_one_asked_for_and_its_config_says_so(
    base: Path, word: str, dtype: str
) -> None:
    """B13: the base is in bfloat16, the masters are in float32."""
    run = base / f"as {word}"
    assert started(base, run, f"model={base / 'bf16'}", *SHORT, f"checkpoint.export_dtype={word}") == 0
    saved = weights_of(read_checkpoint(checkpoint_of(run, 2), step=2))
    assert {tensor.dtype for tensor in saved.values()} == {"F32"}
    tensors = load_file(exported(run) / "model.safetensors")
    assert {str(value.dtype) for value in tensors.values()} == {f"torch.{dtype}"}
    config = json.loads((exported(run) / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == dtype


def test_b14_a_base_whose_generation_settings_contradict_each_other_costs_no_state_and_is_warned_of(base: Path) -> None:
    """B14: exported byte for byte, with a word before the first step."""
    model, run = base / "contradictory", base / "run, contradictory"
    shutil.copytree(base / "tied True", model)
    shutil.copy(CONTRADICTION, model / "generation_config.json")
    assert started(base, run, f"model={model}", *SHORT, "checkpoint.trial=true") == 0
    assert whole_steps(run) == [2]
    assert (exported(run) / "generation_config.json").read_bytes() == CONTRADICTION.read_bytes()
    assert any("contradicts itself" in text for text in notices(run))
