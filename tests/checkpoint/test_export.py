import json
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from safetensors.torch import load_file
from tests.checkpoint.pieces import in_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config

from tidemill.checkpoint.base_model import read_base_model
from tidemill.checkpoint.commit import Committer
from tidemill.checkpoint.export import WholeTensors, export_model, is_export_of
from tidemill.checkpoint.shard import LocalShard
from tidemill.checkpoint.staged import stage
from tidemill.checkpoint.stored import read_checkpoint, weights_of
from tidemill.contracts.checkpoint import SavedTensor, Snapshot, TensorBytes
from tidemill.contracts.events import Event, Notice, Progress
from tidemill.contracts.state import Cursor, RunState
from tidemill.errors import CheckpointError
from tidemill.faults import armed, passed

DATA = Path(__file__).parents[1] / "data"
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
SIZES: dict[str, Any] = {
    "vocab_size": 278,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
IDS = torch.tensor([[5, 17, 200, 3, 277]])


def build(config_class: Any, *, tied: bool) -> Any:
    torch.manual_seed(0)
    sizes = SIZES if config_class is not Qwen2Config else {k: v for k, v in SIZES.items() if k != "head_dim"}
    return AutoModelForCausalLM.from_config(config_class(**sizes, tie_word_embeddings=tied))


def save_base(folder: Path, model: Any, dtype: torch.dtype = torch.float32) -> Path:
    """A base folder as a user has it: other weights than the trained ones, a tokenizer, a template, odd settings."""
    other = build(type(model.config), tied=model.config.tie_word_embeddings).to(dtype)
    other.save_pretrained(folder)
    shutil.copytree(DATA / "tiny_tokenizer", folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_bytes(b"{{ messages }}\r\n  \xc3\xbc")
    shutil.copy(DATA / "generation_config_contradictory.json", folder / "generation_config.json")
    (folder / "optimizer.pt").write_bytes(b"never copied")
    return folder


def weights_of_model(model: Any) -> dict[str, TensorBytes]:
    """As the trainer holds them: tied tensors once."""
    return {name: as_bytes(tensor.detach()) for name, tensor in model.named_parameters()}


def as_bytes(tensor: torch.Tensor) -> TensorBytes:
    raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    return TensorBytes(dtype=NAMES[tensor.dtype], shape=tuple(tensor.shape), data=memoryview(raw))


def load(folder: Path) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype="auto")
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()


def export(base: Path, target: Path, weights: dict[str, TensorBytes], dtype: str = "auto", **options: Any) -> Path:
    defaults: dict[str, Any] = {"emit": lambda event: None}
    return export_model(weights=weights, base=base, target=target, dtype=dtype, **defaults | options)


@pytest.fixture(scope="module")
def trained() -> Any:
    """A tied Qwen3 with weights unlike the base's."""
    return perturbed(build(Qwen3Config, tied=True))


def perturbed(model: Any) -> Any:
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model.eval()


@pytest.fixture(scope="module")
def base(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its base in float32."""
    return save_base(tmp_path_factory.mktemp("base") / "a model ü", trained)


@pytest.mark.parametrize("config_class", [Qwen3Config, Qwen2Config, LlamaConfig])
@pytest.mark.parametrize("tied", [True, False])
def test_an_export_loads_with_the_same_logits(tmp_path: Path, config_class: Any, tied: bool) -> None:
    model = perturbed(build(config_class, tied=tied))
    folder = save_base(tmp_path / "base", model)
    target = export(folder, tmp_path / "export", weights_of_model(model))
    with torch.no_grad():
        assert torch.equal(load(target)(IDS).logits, model(IDS).logits)
    with safetensors.safe_open(target / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) == (not tied)  # noqa: SIM118
        assert file.metadata() == {"format": "pt"}


def test_texts_are_taken_over_byte_for_byte_and_nothing_else(base: Path, trained: Any, tmp_path: Path) -> None:
    target = export(base, tmp_path / "export", weights_of_model(trained))
    copied = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "config.json"}
    assert {path.name for path in target.iterdir()} == copied | {"model.safetensors"}
    assert all((target / name).read_bytes() == (base / name).read_bytes() for name in copied)
    assert AutoTokenizer.from_pretrained(target)("ab").input_ids == AutoTokenizer.from_pretrained(base)("ab").input_ids


def test_weights_that_were_not_trained_come_out_as_the_base_bit_by_bit(base: Path, tmp_path: Path) -> None:
    model = load(base)
    target = export(base, tmp_path / "export", weights_of_model(model))
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (target, base))
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(("dtype", "wanted"), [("auto", "bfloat16"), ("float32", "float32"), ("bfloat16", "bfloat16")])
def test_the_dtype_is_the_bases_unless_asked_for_and_config_says_it(
    trained: Any, tmp_path: Path, dtype: str, wanted: str
) -> None:
    folder = save_base(tmp_path / "base", trained, torch.bfloat16)
    target = export(folder, tmp_path / "export", weights_of_model(trained), dtype)
    assert json.loads((target / "config.json").read_text())["dtype"] == wanted
    loaded = load(target)
    for name, parameter in loaded.named_parameters():
        assert str(parameter.dtype) == f"torch.{wanted}"
        assert torch.equal(parameter, trained.get_parameter(name).to(parameter.dtype)), name


def test_a_base_that_names_no_dtype_is_judged_by_its_weights(trained: Any, tmp_path: Path) -> None:
    folder = save_base(tmp_path / "base", trained, torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    del config["dtype"]
    (folder / "config.json").write_text(json.dumps(config))
    target = export(folder, tmp_path / "export", weights_of_model(trained))
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    assert next(load(target).parameters()).dtype == torch.bfloat16
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    assert read_base_model(folder).dtype == "float32"


def test_rounding_to_bfloat16_is_to_nearest_ties_to_even(tmp_path: Path, trained: Any, base: Path) -> None:
    weights = weights_of_model(trained)
    name = "model.norm.weight"
    # 1 + 2^-8 lies half-way between two neighbours: the even one is below; 1 + 3 * 2^-8: above.
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8] * 8)
    target = export(base, tmp_path / "e", {**weights, name: as_bytes(values)}, "bfloat16")
    assert load(target).get_parameter(name)[:4].tolist() == [1.0, 1 + 2**-6, 1 + 2**-7, -1.0]


def test_large_exports_are_sharded_with_an_index(base: Path, trained: Any, tmp_path: Path) -> None:
    target = export(base, tmp_path / "export", weights_of_model(trained), shard_bytes=20_000)
    shards = sorted(path.name for path in target.glob("*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(shards)
    assert index["metadata"]["total_size"] == sum(4 * p.numel() for p in trained.parameters())
    with torch.no_grad():
        assert torch.equal(load(target)(IDS).logits, trained(IDS).logits)


def test_rows_that_pad_the_vocabulary_are_cut(base: Path, trained: Any, tmp_path: Path) -> None:
    weights = weights_of_model(trained)
    name = "model.embed_tokens.weight"
    padded = torch.cat([trained.get_parameter(name).detach(), torch.ones(10, 32)])
    target = export(base, tmp_path / "export", {**weights, name: as_bytes(padded)})
    assert torch.equal(load(target).get_parameter(name), trained.get_parameter(name))


def test_a_tied_tensor_given_twice_is_written_once_and_must_be_equal(base: Path, trained: Any, tmp_path: Path) -> None:
    weights = weights_of_model(trained)
    twice = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    with safetensors.safe_open(export(base, tmp_path / "e", twice) / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    other = {**weights, "lm_head.weight": as_bytes(torch.zeros(278, 32))}
    with pytest.raises(CheckpointError, match=r"lm_head.weight and model.embed_tokens.weight are tied"):
        export(base, tmp_path / "f", other)


def test_names_and_shapes_that_do_not_fit_are_refused_before_anything_is_written(
    base: Path, trained: Any, tmp_path: Path
) -> None:
    weights = weights_of_model(trained)
    fewer = {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}
    with pytest.raises(CheckpointError, match=r"1 missing \(model.norm.weight\), 1 unexpected \(model.norm\)"):
        export(base, tmp_path / "e", {**fewer, "model.norm": weights["model.norm.weight"]})
    with pytest.raises(CheckpointError, match=r"model.norm.weight has shape \[31\], .* wants \[32\]"):
        export(base, tmp_path / "e", {**weights, "model.norm.weight": as_bytes(torch.zeros(31))})
    with pytest.raises(CheckpointError, match="use auto, float32, bfloat16"):
        export(base, tmp_path / "e", weights, "int4")
    assert not (tmp_path / "e").exists()


def test_an_occupied_target_is_refused_and_untouched(base: Path, trained: Any, tmp_path: Path) -> None:
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "mine").write_text("x")
    with pytest.raises(CheckpointError, match="is there already"):
        export(base, tmp_path / "e", weights_of_model(trained))
    assert [path.name for path in (tmp_path / "e").iterdir()] == ["mine"]


def test_a_failure_anywhere_leaves_no_target_and_the_next_try_works(base: Path, trained: Any, tmp_path: Path) -> None:
    weights = weights_of_model(trained)
    with passed() as names:
        export(base, tmp_path / "probe", weights)
    for name in sorted(set(names)):
        with armed(f"{name}=disk-full"), pytest.raises(CheckpointError, match=r"cannot export to .*disk is full"):
            export(base, tmp_path / "e", weights)
        assert [path.name for path in tmp_path.iterdir()] == ["probe"], name
    (tmp_path / ".e.tidemill-export").mkdir()  # left by a kill
    load(export(base, tmp_path / "e", weights))


def test_a_folder_that_is_no_model_is_said(tmp_path: Path, trained: Any) -> None:
    weights = weights_of_model(trained)
    with pytest.raises(CheckpointError, match="not a readable model folder"):
        export(tmp_path / "none", tmp_path / "e", weights)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(CheckpointError, match="builds no model"):
        export(tmp_path, tmp_path / "e", weights)


def test_progress_and_result_are_said(base: Path, trained: Any, tmp_path: Path) -> None:
    events: list[Event] = []
    export(base, tmp_path / "e", weights_of_model(trained), emit=events.append)
    progress = [event for event in events if isinstance(event, Progress)]
    assert progress[-1].done == progress[-1].total > 0
    assert isinstance(events[-1], Notice) and str(tmp_path / "e") in events[-1].text


def test_an_export_is_told_from_another_by_every_byte(base: Path, trained: Any, tmp_path: Path) -> None:
    weights = weights_of_model(trained)
    target = tmp_path / "e"

    def same(given: dict[str, TensorBytes], dtype: str = "auto") -> bool:
        return is_export_of(target, [WholeTensors(given)], read_base_model(base), dtype=dtype)

    assert not same(weights), "there is none"
    export(base, target, weights, shard_bytes=20_000)
    assert same(weights)
    assert same({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    assert not same(weights, "bfloat16")
    nudged = trained.get_parameter("model.norm.weight").detach().clone()
    nudged[-1] = torch.nextafter(nudged[-1], nudged[-1] + 1)
    assert not same({**weights, "model.norm.weight": as_bytes(nudged)})
    shard = sorted(target.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-1])
    assert not same(weights)


def stored(folder: Path, weights: dict[str, TensorBytes], ranks: int = 3) -> dict[str, SavedTensor]:
    """The weights as a checkpoint of several ranks gives them back."""
    kinds: dict[str, Any] = {"F32": np.float32, "BF16": np.uint16}
    shards = []
    for rank in range(ranks):
        pieces = {}
        for name, tensor in weights.items():
            array = np.frombuffer(tensor.data, dtype=kinds[tensor.dtype]).reshape(tensor.shape)
            pieces[f"model/{name}"] = replace(in_rows(array, ranks)[rank], dtype=tensor.dtype)
        shards.append(LocalShard(pieces))
    state = RunState(step=1, attempt=1, seed=0, cursor=Cursor(), warm_up_cursor=Cursor())
    committer = Committer(folder=folder, attempt=1, identity={}, settings={}, retention={})
    path = committer.commit(stage(state, {"trainer": Snapshot(shards=shards)}), lambda count: None)
    return weights_of(read_checkpoint(path, step=1))


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_weights_in_pieces_are_exported_as_whole_ones_are(base: Path, trained: Any, tmp_path: Path, dtype: str) -> None:
    weights = weights_of_model(trained)
    name = "model.embed_tokens.weight"
    weights[name] = as_bytes(torch.cat([trained.get_parameter(name).detach(), torch.ones(10, 32)]))
    weights["lm_head.weight"] = weights[name]
    pieces: Any = stored(tmp_path, weights)
    whole = export(base, tmp_path / "whole", weights, dtype)
    joined = export(base, tmp_path / "joined", pieces, dtype)
    for path in whole.iterdir():
        assert path.read_bytes() == (joined / path.name).read_bytes()
    assert is_export_of(whole, [WholeTensors(pieces)], read_base_model(base), dtype=dtype)


def test_tied_weights_in_pieces_that_differ_in_one_row_are_refused(base: Path, trained: Any, tmp_path: Path) -> None:
    weights = weights_of_model(trained)
    other = trained.get_parameter("model.embed_tokens.weight").detach().clone()
    other[-1, -1] += 1
    pieces: Any = stored(tmp_path, weights | {"lm_head.weight": as_bytes(other)})
    with pytest.raises(CheckpointError, match="their values differ"):
        export(base, tmp_path / "export", pieces)


def test_an_export_of_pieces_holds_one_tensor_at_a_time(base: Path, trained: Any, tmp_path: Path) -> None:
    pieces: Any = stored(tmp_path, weights_of_model(trained))
    largest = max(tensor.data.nbytes for tensor in pieces.values())
    held: list[weakref.ref[Any]] = []
    alive: list[int] = []

    class Watched:
        def __init__(self, tensor: SavedTensor) -> None:
            self.dtype, self.shape = tensor.dtype, tensor.shape
            self._tensor = tensor

        @property
        def data(self) -> memoryview:
            return self.read((0,) * len(self.shape), self.shape)

        def read(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> memoryview:
            buffer = np.frombuffer(self._tensor.read(offset, shape), dtype=np.uint8).copy()
            alive.append(sum(array.nbytes for ref in held if (array := ref()) is not None))
            held.append(weakref.ref(buffer))
            view: memoryview = buffer.data
            return view

    watched: Any = {name: Watched(tensor) for name, tensor in pieces.items()}
    export(base, tmp_path / "export", watched)
    assert len(alive) == len(pieces) and max(alive) <= largest
