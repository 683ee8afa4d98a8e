"""Tiny random models with a character tokenizer, made on the spot: no network, no download, under a second each.

They are real Hugging Face folders: `from_pretrained` loads them, and so does everything that reads a model folder. The
quick start learns on one of them. What they know is nothing.
"""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

__all__ = [
    "BOS_ID",
    "EOS_ID",
    "PAD_ID",
    "UNK_ID",
    "Alphabet",
    "Family",
    "make_tiny_model",
    "make_tiny_tokenizer",
    "scripted_weights",
    "sort_digits_problem",
]

Alphabet = Literal["characters", "bytes"]
Family = Literal["qwen3", "qwen2", "llama", "mistral", "qwen3_moe", "gemma", "gemma2", "gemma3_text"]

PAD_ID, BOS_ID, EOS_ID, UNK_ID = 0, 1, 2, 3
_SPECIAL = {"<pad>": PAD_ID, "<bos>": BOS_ID, "<eos>": EOS_ID, "<unk>": UNK_ID}
_CONTEXT = 2048
_CHARACTERS = "0123456789+-*/=><,.:;?!()[]{} \nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_#'\"|&^%$@\\~`"
# Windows are shorter than what tests generate, so that they are seen to be kept to.
_MORE: Mapping[str, Mapping[str, Any]] = {
    "mistral": {"sliding_window": 16},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 16},
    "gemma3_text": {
        "sliding_window": 16,
        "query_pre_attn_scalar": 16,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def _character_tokenizer() -> Tokenizer:
    vocabulary = dict(_SPECIAL)
    for character in _CHARACTERS:
        vocabulary[character] = len(vocabulary)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _byte_tokenizer() -> Tokenizer:
    vocabulary = dict(_SPECIAL)
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[symbol] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def make_tiny_tokenizer(alphabet: Alphabet = "characters") -> Any:
    """A fast tokenizer with pad, bos, eos, unk in front of one id for each of a hundred characters, or of 256 bytes.

    It adds no special tokens by itself. Its chat template joins the contents of the messages, so that a chat of one
    message has the ids of the plain text.
    """
    tokenizer = _byte_tokenizer() if alphabet == "bytes" else _character_tokenizer()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=_CONTEXT,
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return fast


def make_tiny_model(
    folder: Path,
    *,
    family: Family = "qwen3",
    tied: bool = True,
    hidden: int = 128,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 4,
    intermediate: int | None = None,
    context: int = _CONTEXT,
    alphabet: Alphabet = "characters",
    seed: int = 0,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> Path:
    """`folder`, filled with config, generation config, safetensors and tokenizer; equal arguments give equal weights.

    Of a mixture of experts the first layer is a dense one; gemma3_text has two layers. `intermediate`, of an expert
    too, is three times `hidden` unless given. The caller's random state is left alone.
    """
    tokenizer = make_tiny_tokenizer(alphabet)
    width = 3 * hidden if intermediate is None else intermediate
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "pad_token_id": PAD_ID,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    }
    if family == "qwen3_moe":
        sizes["moe_intermediate_size"] = width
    config = CONFIG_MAPPING[family](**(sizes | dict(_MORE.get(family, {}))))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = model.to(getattr(torch, dtype))
    model.generation_config = GenerationConfig(pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=EOS_ID)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def scripted_weights(folder: Path, follows: Mapping[int, int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights for an untied tiny model under which, greedily, each id is followed by the one that `follows` names.

    Attention and feed-forward add nothing, so that what is predicted depends on the last token alone; the output row
    of the follower is the embedding of the leader. `hidden` should be 64 or more for a clear lead.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    embedding, output = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    embedding.normal_(generator=torch.Generator().manual_seed(seed))
    output.zero_()
    for leader, follower in follows.items():
        output[follower] += embedding[leader]
    return weights


def sort_digits_problem(rng: random.Random, digits: int = 8) -> tuple[str, str]:
    """A prompt such as `73914082>` and its answer `01234789`: the quick start's task."""
    drawn = [str(rng.randrange(10)) for _ in range(digits)]
    return "".join(drawn) + ">", "".join(sorted(drawn))
