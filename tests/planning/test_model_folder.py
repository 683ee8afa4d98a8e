"""What a model folder tells (`tidemill.planning.model_folder`)."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.planning.test_decoder import config_of, meta_model

from tidemill.errors import DataError
from tidemill.planning.model_folder import read_model
from tidemill.testing.tiny import make_tiny_model


def test_config_and_files_that_agree_are_one_answer(tmp_path: Path) -> None:
    model = read_model(make_tiny_model(tmp_path / "model", hidden=64, heads=2, kv_heads=1))
    held = load_file(tmp_path / "model" / "model.safetensors")
    assert dict(model.shapes) == {name: tuple(tensor.shape) for name, tensor in held.items()}
    assert model.parameters == sum(tensor.numel() for tensor in held.values())
    assert model.largest == max(tensor.numel() for tensor in held.values())
    assert model.source == "config.json, and the files agree"
    layer = sum(tensor.numel() for name, tensor in held.items() if ".layers.0." in name)
    assert model.layers() == [layer, layer]


def test_config_alone_is_enough_for_a_known_type(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    whole = read_model(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    model = read_model(tmp_path / "model")
    assert (model.source, model.shapes) == ("config.json", whole.shapes)


def test_a_tied_head_that_lies_in_the_file_too_counts_once(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", tied=True)
    expected = read_model(folder)
    held = load_file(folder / "model.safetensors")
    save_file(held | {"lm_head.weight": held["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    assert read_model(folder).shapes == expected.shapes


def test_files_that_a_config_does_not_describe_are_believed(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", tied=False)
    held = load_file(folder / "model.safetensors")
    save_file(held | {"model.extra.weight": torch.zeros(7, 3)}, folder / "model.safetensors")
    model = read_model(folder)
    assert model.shapes["model.extra.weight"] == (7, 3)
    assert model.source == "headers of the safetensors files"


def test_experts_that_lie_one_by_one_count_as_the_model_joins_them(tmp_path: Path) -> None:
    config = config_of("qwen3_moe")
    (tmp_path / "config.json").write_text(json.dumps(config))
    joined = {name: tuple(tensor.shape) for name, tensor in meta_model(config).named_parameters()}
    held = {}
    for name, shape in joined.items():
        if name.endswith("gate_up_proj"):
            for expert in range(shape[0]):
                held[f"{name}.{expert}.gate"] = torch.zeros(shape[1] // 2, shape[2])
                held[f"{name}.{expert}.up"] = torch.zeros(shape[1] // 2, shape[2])
        else:
            held[name] = torch.zeros(shape)
    save_file(held, tmp_path / "model.safetensors")
    assert read_model(tmp_path).shapes == joined


def test_an_unknown_type_is_planned_for_from_its_files(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", family="llama", tied=False)
    known = read_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba9"}))
    model = read_model(folder)
    assert dict(model.shapes) == dict(known.shapes)
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match="put its safetensors files into the folder"):
        read_model(folder)


def test_files_of_an_index_are_read_if_all_are_there(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", tied=False)
    expected = read_model(folder).shapes
    held = load_file(folder / "model.safetensors")
    names = sorted(held)
    save_file({name: held[name] for name in names[:5]}, folder / "a.safetensors")
    save_file({name: held[name] for name in names[5:]}, folder / "b.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: "a.safetensors" if name in names[:5] else "b.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    model = read_model(folder)
    assert (model.shapes, model.source) == (expected, "config.json, and the files agree")
    (folder / "b.safetensors").unlink()
    assert read_model(folder).source == "config.json"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", b"{", "config.json cannot be read"),
        ("config.json", b"[]", "not a JSON object"),
        ("model.safetensors", b"\xff" * 8, "model.safetensors is damaged"),
        ("model.safetensors", b"\x02\0\0\0\0\0\0\0[]", "model.safetensors is damaged"),
        ("model.safetensors", b'\x0a\0\0\0\0\0\0\0{"a": {} }', "model.safetensors is damaged"),
        ("model.safetensors", b'\x16\0\0\0\0\0\0\0{"a": {"shape": [-1]}}', "tensor of shape"),
        ("model.safetensors", b'\x16\0\0\0\0\0\0\0{"a": {"shape": "12"}}', "tensor of shape"),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    folder = make_tiny_model(tmp_path / "model")
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        read_model(folder)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"config\.json cannot be read"):
        read_model(tmp_path)


def test_a_damaged_index_is_named(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(DataError, match=r"index\.json cannot be read"):
        read_model(folder)


def test_a_pipe_in_place_of_the_config_is_refused_and_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(DataError, match=r"its config\.json is not a file"):
        read_model(tmp_path)
