"""A causal language model as its config.json describes it: sizes, and the shape of every parameter.

Names and shapes are those that `transformers` gives a model of the type, tied tensors once. No library is asked.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tidemill.errors import DataError
from tidemill.planning.model_config import MOST_LAYERS, ConfigFields

__all__ = ["ARCHITECTURES", "Decoder", "Shape", "buffer_shapes", "decoder_of", "parameter_shapes"]

Shape = tuple[int, ...]
_Bias = Literal["never", "always", "config"]
_ATTENTIONS = frozenset({"sliding_attention", "full_attention"})
_LONGEST = 10**9  # positions, which cost nothing until they are used


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What types of one kind have in common. `config`: a bias where `attention_bias`, or `mlp_bias`, says so.

    `tied` and `head_dim` are what the type has when its config.json is silent; 0 divides the hidden size by the heads.
    `sandwich`: norms behind attention and MLP too. `experts`: a mixture of experts in some layers.
    """

    qkv_bias: _Bias = "never"
    out_bias: _Bias = "never"
    mlp_bias: _Bias = "never"
    head_norms: bool = False
    sandwich: bool = False
    experts: bool = False
    tied: bool = False
    head_dim: int = 0


ARCHITECTURES: Mapping[str, _Family] = {
    "llama": _Family(qkv_bias="config", out_bias="config", mlp_bias="config"),
    "mistral": _Family(),
    "qwen2": _Family(qkv_bias="always"),
    "qwen3": _Family(qkv_bias="config", out_bias="config", head_norms=True, head_dim=128),
    "qwen3_moe": _Family(qkv_bias="config", out_bias="config", head_norms=True, experts=True),
    "smollm3": _Family(qkv_bias="config", out_bias="config", mlp_bias="config", tied=True),
    "gemma": _Family(qkv_bias="config", out_bias="config", tied=True, head_dim=256),
    "gemma2": _Family(qkv_bias="config", out_bias="config", sandwich=True, tied=True, head_dim=256),
    "gemma3_text": _Family(
        qkv_bias="config", out_bias="config", head_norms=True, sandwich=True, tied=True, head_dim=256
    ),
}
"""Types whose parameters are known without the files of weights."""


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """Sizes of a model. `active` is the width of the MLP that one token passes; `context` is in positions."""

    architecture: str
    hidden: int
    active: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    words: int
    context: int
    tied: bool
    head_norms: bool


def decoder_of(config: Mapping[str, Any]) -> Decoder:
    """The sizes in a config.json, of whatever type; of a model that also sees, those of its text part.

    Raises DataError for a size that is missing, or that no model can have.
    """
    named = str(config.get("model_type") or "")
    nested = config.get("text_config")
    fields = ConfigFields(nested if isinstance(nested, dict) else config)
    family = ARCHITECTURES.get(named, _Family())
    active = fields.count("intermediate_size")
    if family.experts:
        active = fields.count("num_experts_per_tok", 8) * fields.count("moe_intermediate_size")
    heads = fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.refusal("num_key_value_heads", f"a divisor of num_attention_heads = {heads} is needed")
    return Decoder(
        architecture=named,
        hidden=fields.count("hidden_size"),
        active=active,
        layers=fields.count("num_hidden_layers", most=MOST_LAYERS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=fields.count("head_dim", family.head_dim or _head_dim(fields, heads)),
        words=fields.count("vocab_size"),
        context=fields.count("max_position_embeddings", most=_LONGEST),
        tied=fields.flag("tie_word_embeddings", family.tied),
        head_norms=family.head_norms,
    )


def _head_dim(fields: ConfigFields, heads: int) -> int:
    """What a silent config.json means; 0 where the heads have no equal parts, and only its own `head_dim` will do."""
    hidden = fields.count("hidden_size")
    return 0 if hidden % heads else hidden // heads


def buffer_shapes(config: Mapping[str, Any]) -> tuple[Shape, ...]:
    """Of the float32 buffers that the model computes: rotary frequencies, as they are and as they were at first."""
    decoder = decoder_of(config)
    rotary = (decoder.head_dim // 2,)
    if decoder.architecture == "gemma3_text":
        kinds = ConfigFields(config).kinds("layer_types", known=_ATTENTIONS, count=decoder.layers)
        return ((), *((rotary,) * 2 * len(kinds)))
    return ((), rotary, rotary) if decoder.architecture in ("gemma", "gemma2") else (rotary, rotary)


def parameter_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Every parameter by name, in the model's order. Raises DataError for a type that is not in ARCHITECTURES."""
    decoder, fields = decoder_of(config), ConfigFields(config)
    if decoder.architecture not in ARCHITECTURES:
        raise DataError(
            f"cannot plan for a model of type {decoder.architecture!r} from its config.json alone: known are "
            f"{', '.join(ARCHITECTURES)}; put its safetensors files into the folder, whose headers tell all shapes"
        )
    found: dict[str, Shape] = {"model.embed_tokens.weight": (decoder.words, decoder.hidden)}
    mixed = _mixed(decoder, fields)
    for layer in range(decoder.layers):
        for name, shape in _layer(decoder, fields, experts=layer in mixed):
            found[f"model.layers.{layer}.{name}"] = shape
    found["model.norm.weight"] = (decoder.hidden,)
    if not decoder.tied:
        found["lm_head.weight"] = (decoder.words, decoder.hidden)
    return found


def _layer(decoder: Decoder, fields: ConfigFields, *, experts: bool) -> Iterator[tuple[str, Shape]]:
    family, hidden = ARCHITECTURES[decoder.architecture], decoder.hidden
    own, shared = decoder.heads * decoder.head_dim, decoder.kv_heads * decoder.head_dim
    into, out = (_has(bias, fields.flag("attention_bias")) for bias in (family.qkv_bias, family.out_bias))
    for name, rows in (("q", own), ("k", shared), ("v", shared)):
        yield from _linear(f"self_attn.{name}_proj", rows, hidden, into)
    yield from _linear("self_attn.o_proj", hidden, own, out)
    if family.head_norms:
        yield "self_attn.q_norm.weight", (decoder.head_dim,)
        yield "self_attn.k_norm.weight", (decoder.head_dim,)
    if experts:
        yield from _experts(fields, hidden)
    else:
        width, bias = fields.count("intermediate_size"), _has(family.mlp_bias, fields.flag("mlp_bias"))
        for name in ("gate", "up"):
            yield from _linear(f"mlp.{name}_proj", width, hidden, bias)
        yield from _linear("mlp.down_proj", hidden, width, bias)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if family.sandwich:
        yield "pre_feedforward_layernorm.weight", (hidden,)
        yield "post_feedforward_layernorm.weight", (hidden,)


def _linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _has(bias: _Bias, said: bool) -> bool:
    return bias == "always" or (bias == "config" and said)


def _mixed(decoder: Decoder, fields: ConfigFields) -> frozenset[int]:
    """The layers whose MLP is a mixture of experts."""
    if not ARCHITECTURES[decoder.architecture].experts:
        return frozenset()
    step = fields.count("decoder_sparse_step", 1)
    return frozenset(range(step - 1, decoder.layers, step)) - fields.numbers("mlp_only_layers")


def _experts(fields: ConfigFields, hidden: int) -> Iterator[tuple[str, Shape]]:
    # Newer configs call the number of experts otherwise.
    experts = fields.count("num_experts", fields.count("num_local_experts", 128))
    width = fields.count("moe_intermediate_size")
    yield "mlp.experts.gate_up_proj", (experts, 2 * width, hidden)
    yield "mlp.experts.down_proj", (experts, hidden, width)
    yield "mlp.gate.weight", (experts, hidden)
