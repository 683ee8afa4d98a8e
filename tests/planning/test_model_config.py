"""Values that no model's config.json can have (`tidemill.planning.model_config`)."""

from typing import Any

import pytest
from tests.planning.test_decoder import config_of

from tidemill.errors import DataError
from tidemill.planning.decoder import buffer_shapes, decoder_of, parameter_shapes
from tidemill.planning.model_config import MOST_LAYERS, WIDEST, ConfigFields


@pytest.mark.parametrize(
    ("family", "name", "value", "needed"),
    [
        ("llama", "hidden_size", 10**400, f"a number above 0 and up to {WIDEST}"),
        ("llama", "num_hidden_layers", 10**9, f"a number above 0 and up to {MOST_LAYERS}"),
        ("llama", "num_key_value_heads", 7, "a divisor of num_attention_heads = 4"),
        ("llama", "tie_word_embeddings", "false", "true or false"),
        ("llama", "attention_bias", "no", "true or false"),
        ("llama", "mlp_bias", 1, "true or false"),
        ("gemma3_text", "layer_types", 5, "a list of 4, one a layer"),
        ("gemma3_text", "layer_types", [[1]] * 4, "a list of 4, one a layer"),
        ("gemma3_text", "layer_types", ["full_attention"], "a list of 4, one a layer"),
        ("qwen3_moe", "mlp_only_layers", 7, "a list of whole numbers"),
        ("qwen3_moe", "mlp_only_layers", [[1]], "a list of whole numbers"),
        ("qwen3_moe", "decoder_sparse_step", 0, "a number above 0"),
        ("qwen3_moe", "num_experts", "all", "a number above 0"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_value_of_another_kind_is_named_with_what_is_needed(family: str, name: str, value: Any, needed: str) -> None:
    config = config_of(family) | {name: value}
    with pytest.raises(DataError, match=rf"has {name} = .*, where {needed}") as refused:
        parameter_shapes(config)
        buffer_shapes(config)
    assert len(str(refused.value)) < 300


def test_heads_without_equal_parts_have_a_width_of_their_own() -> None:
    config = config_of("llama") | {"hidden_size": 30}
    assert decoder_of(config | {"head_dim": 8}).head_dim == 8
    with pytest.raises(DataError, match="head_dim = None"):
        decoder_of(config | {"head_dim": None})


def test_the_largest_model_that_is_planned_for_is_planned_for_in_seconds() -> None:
    assert len(parameter_shapes(config_of("llama") | {"num_hidden_layers": MOST_LAYERS})) > 9 * MOST_LAYERS


def test_fields_that_are_absent_or_null_have_their_defaults() -> None:
    for fields in (ConfigFields({}), ConfigFields(dict.fromkeys(("width", "tied", "plain", "kinds")))):
        assert fields.count("width", 7) == 7
        assert fields.flag("tied", True) and not fields.flag("tied")
        assert fields.numbers("plain") == frozenset()
        assert fields.kinds("kinds", known=frozenset({"a", "b"}), count=1) == {"a", "b"}
