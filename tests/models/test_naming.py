"""tidemill.models.naming: our names, shapes and bytes against those that transformers writes, and reads again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tidemill.checkpoint.export import export_model
from tidemill.contracts.checkpoint import SavedTensor, TensorBytes
from tidemill.contracts.events import ignore
from tidemill.errors import CheckpointError, DataError
from tidemill.models.naming import model_naming
from tidemill.names.architectures import ARCHITECTURES

EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
MORE: dict[str, dict[str, Any]] = {
    "qwen3_moe": EXPERTS | {"mlp_only_layers": [0]},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 20},
    "olmoe": {"num_experts": 3, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 3},
}


def model_of(kind: str, **changes: Any) -> Any:
    sizes = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 28,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = CONFIG_MAPPING[kind](**(sizes | MORE.get(kind, {}) | changes))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def saved(tensor: torch.Tensor) -> SavedTensor:
    return TensorBytes(dtype="F32", shape=tuple(tensor.shape), data=memoryview(tensor.detach().numpy().tobytes()))


def held(network: Any) -> dict[str, SavedTensor]:
    """As a trainer has them: every parameter by its name in memory, tied ones once."""
    return {name: saved(tensor) for name, tensor in network.named_parameters()}


def logits(network: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = network(torch.arange(3, 23)[None]).logits
    return found


def same(ours: Path, theirs: Path) -> None:
    found, wanted = (
        {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
        for folder in (ours, theirs)
    )
    assert sorted(found) == sorted(wanted)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_an_export_is_what_transformers_writes_and_reads(tmp_path: Path, kind: str, tied: bool) -> None:
    network = model_of(kind, tie_word_embeddings=tied)
    network.save_pretrained(tmp_path / "theirs")
    export_model(
        weights=held(network),
        base=tmp_path / "theirs",
        target=tmp_path / "ours",
        dtype="float32",
        emit=ignore,
        shard_bytes=10_000,
    )
    same(tmp_path / "ours", tmp_path / "theirs")
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[f"{how}_keys"] for how in ("missing", "unexpected", "mismatched"))
    assert torch.equal(logits(again), logits(network))
    files = {
        name: saved(tensor)
        for file in (tmp_path / "theirs").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    export_model(weights=files, base=tmp_path / "theirs", target=tmp_path / "back", dtype="float32", emit=ignore)
    same(tmp_path / "back", tmp_path / "theirs")


def test_weights_under_both_kinds_of_names_or_some_of_either_are_refused(tmp_path: Path) -> None:
    network = model_of("qwen3_moe")
    network.save_pretrained(tmp_path / "base")
    files = {name: saved(tensor) for name, tensor in load_file(tmp_path / "base" / "model.safetensors").items()}
    one = "model.layers.1.mlp.experts.1.up_proj.weight"
    missing = {name: tensor for name, tensor in files.items() if name != one}
    for weights, said in (
        (held(network) | {one: files[one]}, rf"0 missing \(none\), 1 unexpected \({one}\)"),
        (missing, rf"1 missing \({one}\), 0 unexpected"),
        (files | {one: saved(torch.zeros(16, 12))}, rf"{one} has shape \[16, 12\].* wants \[12, 16\]"),
        (files | {one.replace(".1.up", ".3.up"): files[one]}, r"1 unexpected \(model.layers.1.mlp.experts.3.up_proj"),
    ):
        with pytest.raises(CheckpointError, match=said):
            export_model(weights=weights, base=tmp_path / "base", target=tmp_path / "out", dtype="auto", emit=ignore)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["granite", "phi3", "olmo2"])
def test_a_type_that_transformers_writes_as_it_holds_it_needs_no_rules(tmp_path: Path, kind: str) -> None:
    network = model_of(kind)
    assert kind not in ARCHITECTURES
    assert list(model_naming(network).names) == [name for name, _ in network.named_parameters()]
    network.save_pretrained(tmp_path / "theirs")
    export_model(
        weights=held(network), base=tmp_path / "theirs", target=tmp_path / "ours", dtype="float32", emit=ignore
    )
    same(tmp_path / "ours", tmp_path / "theirs")


def test_a_type_that_is_written_in_a_way_unknown_to_us_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with torch.device("meta"):
        network = model_of("deepseek_v3")
    with pytest.raises(DataError, match=r"'deepseek_v3'.*known for mixtral, olmoe, qwen2_moe, qwen3_moe only; choose"):
        model_naming(network)
    network.config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"cannot export to a model such as that in .*'deepseek_v3'"):
        export_model(weights={}, base=tmp_path, target=tmp_path / "out", dtype="auto", emit=ignore)
