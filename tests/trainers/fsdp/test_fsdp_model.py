"""tidemill.trainers.fsdp.model"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tidemill.errors import DataError
from tidemill.trainers.fsdp.model import load_predictor

Models = Callable[..., Path]
CPU = torch.device("cpu")


def load(folder: Path) -> torch.nn.Module:
    network: torch.nn.Module = load_predictor(folder, device=CPU, recompute=False).network
    return network


def copy_of(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def test_masters_are_float32_and_the_model_is_in_train_mode_without_dropout(
    tiny_models: Models, tmp_path: Path
) -> None:
    folder = copy_of(tiny_models("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5}))
    network = load(folder)
    assert network.training
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
    ids = torch.tensor([[5, 6, 7]])
    assert network(ids).logits.equal(network(ids).logits)


def test_loading_writes_nothing_to_the_terminal(tiny_models: Models, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tiny_models()
    capfd.readouterr()
    load(folder)
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        load(tmp_path / "nowhere")


def test_a_folder_without_weights_is_refused(tiny_models: Models, tmp_path: Path) -> None:
    folder = copy_of(tiny_models(), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match="cannot load a model"):
        load(folder)


def test_a_weights_file_cut_short_is_refused(tiny_models: Models, tmp_path: Path) -> None:
    folder = copy_of(tiny_models(), tmp_path / "model")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(DataError, match="cannot load a model"):
        load(folder)


def test_a_model_of_an_unknown_type_is_refused_with_the_known_ones(tiny_models: Models, tmp_path: Path) -> None:
    folder = copy_of(tiny_models(), tmp_path / "model")
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(DataError, match=r"'gpt2'.*llama, mistral, qwen2, qwen3, qwen3_moe, gemma"):
        load(folder)


def test_experts_may_be_joined_in_the_files_as_they_are_in_memory(tiny_models: Models, tmp_path: Path) -> None:
    apart = tiny_models("qwen3_moe", False)
    folder = copy_of(apart, tmp_path / "model")
    wanted = dict(AutoModelForCausalLM.from_pretrained(apart, dtype=torch.float32).named_parameters())
    held = {name: tensor.detach().clone() for name, tensor in wanted.items()}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    for network in (load(folder), load(apart)):
        found = dict(network.named_parameters())
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"1.down_proj": None}, r"1 missing \(model.layers.1.mlp.experts.1.down_proj.weight"),
        ({"4.down_proj": (32, 96)}, r"1 unexpected \(model.layers.1.mlp.experts.4.down_proj.weight"),
        ({"1.down_proj": (96, 32)}, r"1 mismatched \(model.layers.1.mlp.experts.1.down_proj.weight"),
    ],
)
def test_experts_that_do_not_fit_the_config_are_named(
    tiny_models: Models, tmp_path: Path, change: dict[str, tuple[int, ...] | None], said: str
) -> None:
    folder = copy_of(tiny_models("qwen3_moe", False), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for short, shape in change.items():
        name = f"model.layers.1.mlp.experts.{short}.weight"
        tensors.pop(name, None)
        tensors |= {} if shape is None else {name: torch.zeros(shape)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match=said):
        load(folder)


@pytest.mark.parametrize("change", ["missing", "unexpected", "mismatched"])
def test_weights_that_do_not_fit_the_config_are_refused_and_never_made_up(
    tiny_models: Models, tmp_path: Path, change: str
) -> None:
    folder = copy_of(tiny_models(), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "unexpected":
        tensors["model.layers.7.mlp.up_proj.weight"] = tensors[name].clone()
    else:
        tensors[name] = tensors[name][:5].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DataError, match="mlp.up_proj.weight|cannot load a model"):
        load(folder)
