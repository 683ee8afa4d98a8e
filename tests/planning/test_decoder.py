"""Parameters of a model as its config.json tells them (`tidemill.planning.decoder`)."""

import json
from typing import Any

import pytest
import torch
import transformers

from tidemill.errors import DataError
from tidemill.planning.decoder import ARCHITECTURES, buffer_shapes, decoder_of, parameter_shapes
from tidemill.trainers.fsdp import model as trained

CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "smollm3": transformers.SmolLM3Config,
    "gemma": transformers.GemmaConfig,
    "gemma2": transformers.Gemma2Config,
    "gemma3_text": transformers.Gemma3TextConfig,
}
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BIASED: dict[str, dict[str, Any]] = {"mistral": {}, "qwen2": {}, "llama": {"attention_bias": True, "mlp_bias": True}}
EXPERTS = {
    "num_experts": 6,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
}


def config_of(family: str, **values: Any) -> dict[str, Any]:
    """As a folder's config.json holds it."""
    more = EXPERTS if family == "qwen3_moe" else {}
    text: dict[str, Any] = json.loads(CONFIGS[family](**SMALL, **more, **values).to_json_string(use_diff=True))
    return text


def meta_model(config: dict[str, Any]) -> Any:
    """What transformers makes of it, without memory."""
    made = CONFIGS[config["model_type"]](**{name: value for name, value in config.items() if name != "model_type"})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    model.tie_weights()
    return model


def test_all_families_are_compared() -> None:
    assert set(CONFIGS) == set(ARCHITECTURES)
    assert set(trained._MODEL_TYPES) <= set(ARCHITECTURES)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", CONFIGS)
def test_names_and_shapes_are_those_of_transformers_in_its_order(family: str, tied: bool) -> None:
    for more in ({}, BIASED.get(family, {"attention_bias": True})):
        config = config_of(family, tie_word_embeddings=tied, **more)
        model = meta_model(config)
        assert list(parameter_shapes(config).items()) == [
            (name, tuple(tensor.shape)) for name, tensor in model.named_parameters()
        ]
        assert sorted(buffer_shapes(config)) == sorted(tuple(buffer.shape) for buffer in model.buffers())


@pytest.mark.parametrize("family", CONFIGS)
def test_a_config_that_is_silent_means_what_transformers_takes_it_for(family: str) -> None:
    config = config_of(family)
    for name in ("head_dim", "tie_word_embeddings", "attention_bias"):
        config.pop(name, None)
    if family in ("llama", "smollm3"):
        config.pop("num_key_value_heads")
    expected = {name: tuple(tensor.shape) for name, tensor in meta_model(config).named_parameters()}
    assert parameter_shapes(config) == expected


def test_sizes_are_those_of_the_model() -> None:
    decoder = decoder_of(config_of("qwen3", head_dim=16, tie_word_embeddings=True))
    assert (decoder.heads, decoder.kv_heads, decoder.head_dim, decoder.words) == (4, 2, 16, 64)
    assert decoder.tied and decoder.head_norms
    assert decoder_of(config_of("qwen3_moe")).active == 2 * 24


def test_an_unknown_type_is_refused_with_what_to_do() -> None:
    config = config_of("llama") | {"model_type": "mamba9"}
    with pytest.raises(DataError, match=r"type 'mamba9' .* known are llama, .* put its safetensors files"):
        parameter_shapes(config)


@pytest.mark.parametrize("value", [None, 0, -3, "many", True, 1.5])
def test_a_size_that_is_none_is_named(value: Any) -> None:
    with pytest.raises(DataError, match="hidden_size = "):
        decoder_of(config_of("llama") | {"hidden_size": value})


def test_of_a_model_that_sees_the_text_part_counts() -> None:
    config = {"model_type": "seeing", "text_config": config_of("llama")}
    assert decoder_of(config).hidden == 32
