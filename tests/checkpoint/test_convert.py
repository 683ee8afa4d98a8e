"""Weights in formats of pickles, as a model folder: what comes out is what went in.

Modules: tidemill.checkpoint.foreign.convert, tidemill.checkpoint.foreign.sources, tidemill.checkpoint.foreign.tensors,
tidemill.checkpoint.foreign.names.
"""

import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tidemill.checkpoint.foreign.convert import Converted, convert
from tidemill.checkpoint.foreign.names import matched
from tidemill.checkpoint.foreign.sources import open_bins, open_dcp
from tidemill.checkpoint.foreign.tensors import Located, StridedTensor, joined, located
from tidemill.contracts.events import ignore
from tidemill.errors import CheckpointError, CheckpointRefused, ConfigError
from tidemill.testing.tiny import make_tiny_model

State = dict[str, Any]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with tied embeddings."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "base", hidden=32, layers=2, heads=2, kv_heads=2)


@pytest.fixture(scope="module")
def trained(base: Path) -> State:
    """Other weights than the base's, by the names of the whole state, the tied one twice."""
    model = AutoModelForCausalLM.from_pretrained(base)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return dict(model.state_dict())


def converted(kind: str, source: Path, target: Path, base: Path | None, prefix: str | None = None) -> Converted:
    return convert(kind=kind, source=source, base=base, target=target, dtype="auto", prefix=prefix, emit=ignore)


def same_weights(folder: Path, wanted: State) -> bool:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    found = model.state_dict()
    return set(found) == set(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)


def save_dcp(state: State, folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def hf_folder(folder: Path, base: Path, state: State, shards: int = 1) -> Path:
    """As transformers wrote them before safetensors."""
    folder.mkdir()
    for path in base.iterdir():
        if path.suffix != ".safetensors":
            shutil.copyfile(path, folder / path.name)
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return folder
    names = sorted(state)
    places = {name: f"pytorch_model-{1 + i % shards:05d}-of-{shards:05d}.bin" for i, name in enumerate(names)}
    for file in set(places.values()):
        torch.save({name: state[name] for name in names if places[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_of_bins_becomes_a_model_folder(base: Path, trained: State, tmp_path: Path, shards: int) -> None:
    source = hf_folder(tmp_path / "hf", base, trained, shards)
    made = converted("hf", source, tmp_path / "out", None)
    assert (made.prefix, made.notices) == ("", ())
    assert same_weights(tmp_path / "out", trained)
    for name in ("tokenizer.json", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (base / name).read_bytes()


@pytest.mark.parametrize("kind", ["bins", "apart", "joined", "wrapped"])
def test_experts_are_taken_each_for_itself_or_joined(tmp_path: Path, kind: str) -> None:
    """As files have them, or as a framework saves what it holds."""
    base = make_tiny_model(tmp_path / "base", family="qwen3_moe", tied=False, hidden=32, heads=2, kv_heads=2)
    files = {name: tensor + 1 for name, tensor in load_file(base / "model.safetensors").items()}
    held = {name: tensor + 1 for name, tensor in AutoModelForCausalLM.from_pretrained(base).state_dict().items()}
    if kind == "bins":
        source = hf_folder(tmp_path / "hf", base, files, shards=2)
    else:
        state = {"apart": files, "joined": held}.get(kind) or {
            name.replace(".experts.", ".experts._orig_mod."): tensor for name, tensor in files.items()
        }
        source = save_dcp({f"actor.{name}": tensor for name, tensor in state.items()}, tmp_path / "dcp")
    result = converted("hf" if kind == "bins" else "dcp", source, tmp_path / "out", None if kind == "bins" else base)
    assert result.tensors == len(held if kind == "joined" else files)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == files.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in files.items())


@pytest.mark.parametrize("prefix", ["", "app.model.", "model."])
def test_a_distributed_checkpoint_becomes_a_model_folder_whatever_stands_before_its_names(
    base: Path, trained: State, tmp_path: Path, prefix: str
) -> None:
    state: State = {prefix + name: tensor for name, tensor in trained.items()}
    first = sorted(state)[0]
    state |= {"optimizer.step": torch.tensor(3.0), f"optimizer.state.{first}.exp_avg": torch.zeros(3), "lr": 0.1}
    source = save_dcp(state, tmp_path / "dcp")
    made = converted("dcp", source, tmp_path / "out", base)
    assert made.prefix == prefix and same_weights(tmp_path / "out", trained)
    (notice,) = made.notices
    assert notice.startswith("2 tensors belong to no part of the model: optimizer.s")


def test_nested_states_wrappers_and_other_layouts_are_seen_through(base: Path, trained: State, tmp_path: Path) -> None:
    state: State = {}
    for number, (name, tensor) in enumerate(trained.items()):
        name = name.replace("model.layers.", "model.layers._checkpoint_wrapped_module.")
        layout = tensor.t().contiguous().t() if tensor.dim() == 2 and number % 2 else tensor
        state[f"_orig_mod.{name}"] = torch.nn.Parameter(layout) if number % 3 == 0 else layout
    save_dcp({"app": {"model": state, "names": ["x"]}}, tmp_path / "dcp")
    assert converted("dcp", tmp_path / "dcp", tmp_path / "a", base).prefix == "app.model."
    assert same_weights(tmp_path / "a", trained)
    hf_folder(tmp_path / "hf", base, {"epoch": 3, "state_dict": state})
    assert converted("hf", tmp_path / "hf", tmp_path / "b", None).prefix == "state_dict."
    assert same_weights(tmp_path / "b", trained)


_RANK = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard, Replicate, init_device_mesh, distribute_tensor
rank, folder, state = int(sys.argv[1]), sys.argv[2], torch.load(sys.argv[3], weights_only=True)
dist.init_process_group("gloo", init_method="file://" + sys.argv[4], rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
cut = {name: distribute_tensor(tensor, mesh, [Shard(number % max(1, tensor.dim())) if number % 3 else Replicate()])
       for number, (name, tensor) in enumerate(sorted(state.items()))}
dcp.save({"model": cut}, checkpoint_id=folder)
"""


def test_pieces_of_several_ranks_are_joined(base: Path, trained: State, tmp_path: Path) -> None:
    torch.save(trained, tmp_path / "state.pt")
    words = [str(tmp_path / "dcp"), str(tmp_path / "state.pt"), str(tmp_path / "meet")]
    ranks = [subprocess.Popen([sys.executable, "-c", _RANK, str(rank), *words]) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    assert converted("dcp", tmp_path / "dcp", tmp_path / "out", base).prefix == "model."
    assert same_weights(tmp_path / "out", trained)
    (tmp_path / "dcp" / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"'__1_0.distcp', which .metadata names, is not there"):
        converted("dcp", tmp_path / "dcp", tmp_path / "again", base)
    assert not (tmp_path / "again").exists()


def test_weights_that_do_not_fit_the_base_are_refused(base: Path, trained: State, tmp_path: Path) -> None:
    lacking = {name: tensor for name, tensor in trained.items() if name != "model.norm.weight"}
    with pytest.raises(CheckpointError, match=r"1 of the model's .* tensors are missing .model\.norm\.weight"):
        converted("dcp", save_dcp(lacking, tmp_path / "lacking"), tmp_path / "out", base)
    other = {**trained, "model.norm.weight": torch.zeros(5)}
    with pytest.raises(CheckpointError, match=r"cannot convert .*model.norm.weight has shape \[5\]"):
        converted("dcp", save_dcp(other, tmp_path / "other"), tmp_path / "out", base)
    untied = {**trained, "lm_head.weight": trained["lm_head.weight"] + 1}
    with pytest.raises(CheckpointError, match="tied"):
        converted("dcp", save_dcp(untied, tmp_path / "untied"), tmp_path / "out", base)
    twice = {f"{place}.{name}": tensor for name, tensor in trained.items() for place in ("model", "ema")}
    source = save_dcp(twice, tmp_path / "twice")
    with pytest.raises(CheckpointError, match="more than once, under 'ema.', 'model.'; choose one with --prefix"):
        converted("dcp", source, tmp_path / "out", base)
    assert not (tmp_path / "out").exists()
    assert converted("dcp", source, tmp_path / "out", base, prefix="ema").prefix == "ema."
    with pytest.raises(CheckpointRefused, match="it is there already"):
        converted("dcp", source, tmp_path / "out", base, prefix="ema.")


def test_folders_that_are_not_what_they_are_called_are_refused(base: Path, trained: State, tmp_path: Path) -> None:
    source = save_dcp(trained, tmp_path / "dcp")
    wrong = [
        ("dcp", tmp_path / "none", base, "is no folder that is there"),
        ("dcp", source, None, "with --base"),
        ("dcp", base, base, "no .metadata in it"),
        ("dcp", source, tmp_path, "no config.json in"),
        ("hf", source, base, r"no pytorch_model\*.bin in it"),
        ("hf", base, None, "holds safetensors already"),
    ]
    for kind, folder, model, why in wrong:
        with pytest.raises(ConfigError, match=why):
            converted(kind, folder, tmp_path / "out", model)
    index = tmp_path / "hf" / "pytorch_model.bin.index.json"
    hf_folder(tmp_path / "hf", base, trained, shards=2)
    (tmp_path / "hf" / "pytorch_model-00001-of-00002.bin").unlink()
    with pytest.raises(CheckpointError, match="pytorch_model-00001-of-00002.bin, which .* names, is not there"):
        converted("hf", tmp_path / "hf", tmp_path / "out", None)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="it is no index of weights"):
        converted("hf", tmp_path / "hf", tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


def test_every_dtype_is_described_as_it_is(tmp_path: Path) -> None:
    dtypes = {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
        "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16,
        "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
    }  # fmt: skip
    state = {name: torch.arange(6).reshape(2, 3).to(dtype) for name, dtype in dtypes.items()}
    torch.save({**state, "view": torch.arange(10.0)[3:5], "none": torch.zeros(0, 4)}, tmp_path / "pytorch_model.bin")
    bins = open_bins(tmp_path)
    for source, names in ((bins, [*state, "view", "none"]), (open_dcp(save_dcp(state, tmp_path / "dcp")), list(state))):
        found = source.tensors(names)
        for name, tensor in state.items():
            assert (found[name].dtype, found[name].shape) == (name, (2, 3))
            assert bytes(found[name].data) == tensor.view(torch.uint8).numpy().tobytes(), name
    assert np.frombuffer(bins.tensors(["view"])["view"].data, dtype=np.float32).tolist() == [3.0, 4.0]
    assert bytes(bins.tensors(["none"])["none"].data) == b""


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_boxes_of_strided_pieces_are_those_of_numpy(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    axes = data.draw(st.permutations(range(len(shape))))
    turned = np.ascontiguousarray(whole.transpose(axes))
    strides = tuple(stride // 4 for stride in turned.transpose(np.argsort(axes)).strides)
    path = tmp_path_factory.mktemp("strided") / "file"
    path.write_bytes(b"abc" + turned.tobytes())
    piece = Located(path=path, dtype="F32", begin=3, shape=shape, strides=strides, offset=(0,) * len(shape))
    assert piece.end == path.stat().st_size
    tensor = joined("w", [piece], shape)
    assert isinstance(tensor, StridedTensor) != piece.row_major
    low = tuple(data.draw(st.integers(0, side)) for side in shape)
    size = tuple(data.draw(st.integers(0, side - start)) for side, start in zip(shape, low, strict=True))
    cut = tuple(slice(start, start + length) for start, length in zip(low, size, strict=True))
    assert bytes(tensor.read(low, size)) == whole[cut].tobytes()
    assert bytes(tensor.data) == whole.tobytes()


def test_what_a_child_says_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64))
    good = {"dtype": "F32", "shape": [4], "strides": [1], "begin": 48}
    assert located(good, path, 64).end == 64
    bad: list[dict[str, Any]] = [
        {"begin": 52}, {"begin": -4}, {"begin": 1.0}, {"strides": [2]}, {"strides": []}, {"shape": [1 << 61]},
        {"dtype": "V4"}, {"shape": None}, {"shape": [True]},
    ]  # fmt: skip
    for change in bad:
        with pytest.raises(CheckpointError, match="cannot read"):
            located({**good, **change}, path, 64)
    with pytest.raises(CheckpointError, match="cannot read"):
        located({}, path, 64)
    piece = located(good, path, 64)
    with pytest.raises(CheckpointError, match="cannot read w"):
        joined("w", [piece], (5,))
    with pytest.raises(CheckpointError, match="no pieces of its rank"):
        joined("w", [piece], (2, 2))


def test_names_are_matched_by_what_stands_before_them() -> None:
    wanted, tied = ["model.a.weight", "model.b"], {"lm_head.weight": "model.a.weight"}
    assert matched(wanted, wanted, tied, None) == ("", {name: name for name in wanted})
    names = ["x.model.a.weight", "x.module._orig_mod.other", "x._orig_mod.model.b", "x.lm_head.weight", "model.b"]
    prefix, found = matched(names, wanted, tied, None)
    assert prefix == "x." and found == {
        "model.a.weight": "x.model.a.weight",
        "model.b": "x._orig_mod.model.b",
        "lm_head.weight": "x.lm_head.weight",
    }
    with pytest.raises(CheckpointError, match="2 of the model's 2 tensors are missing .*there are 1 tensors .other"):
        matched(["other"], wanted, tied, None)
    with pytest.raises(CheckpointError, match="1 of the model's 2 tensors are missing .x.model.a.weight"):
        matched(names[1:3], wanted, tied, None)
    with pytest.raises(CheckpointError, match="2 of the model's 2"):
        matched(names, wanted, tied, "y")
    assert matched(names[1:4], wanted, tied, None)[1]["model.a.weight"] == "x.lm_head.weight"
