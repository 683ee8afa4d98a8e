"""vLLM's own options, as a user gives them: read, checked against the installed vLLM, and none that we decide."""

import difflib
import tomllib
from collections.abc import Collection, Sequence
from typing import Any

from tidemill.errors import ConfigError

__all__ = ["native_options"]

_SETTING = {
    "model": "model",
    "tokenizer": "model",
    "seed": "run.seed",
    "dtype": "engine.dtype",
    "max_num_seqs": "engine.max_batch",
    "max_model_len": "data.max_prompt_tokens and rollout.sampling.max_new_tokens",
    "kv_cache_memory_bytes": "engine.kv_memory",
    "num_gpu_blocks_override": "engine.kv_memory",
    "gpu_memory_utilization": "engine.kv_memory",
    "enforce_eager": "engine.graphs",
}
"""Options that another setting decides."""

_FIXED = {
    "load_format": "weights come from the trainer",
    "enable_sleep_mode": "the engine sleeps whenever the trainer needs the memory",
    "enable_cumem_allocator": "the engine sleeps whenever the trainer needs the memory",
    "logprobs_mode": "log-probs are those of the distribution sampled from",
    "generation_config": "sampling follows rollout.sampling alone",
    "override_generation_config": "sampling follows rollout.sampling alone",
    "skip_tokenizer_init": "texts are decoded by the model folder's tokenizer",
    "disable_log_stats": "progress is recorded by Tidemill",
    "use_tqdm_on_load": "progress is recorded by Tidemill",
    "distributed_executor_backend": "the engine runs in its own worker",
    "weight_transfer_config": "weights come from the trainer",
    "trust_remote_code": "no code from a model folder is run",
}
"""Options that the engine decides."""

_NOT_YET = {
    "tensor_parallel_size": "an engine of more than one GPU",
    "pipeline_parallel_size": "an engine of more than one GPU",
    "data_parallel_size": "an engine of more than one GPU; engine.replicas makes several engines",
    "enable_lora": "LoRA",
    "speculative_config": "speculative decoding",
    "quantization": "quantized weights",
    "kv_transfer_config": "a cache that is shared with others",
    "enable_expert_parallel": "an engine of more than one GPU",
    "kv_cache_dtype": "a quantized cache",
    "cpu_offload_gb": "weights outside of the device",
}
"""Options for what the engine cannot do."""


def native_options(written: Sequence[str], known: Collection[str]) -> dict[str, Any]:
    """Values by name, of texts `name=value` whose right side is TOML. `known` are the names that vLLM has.

    Raises ConfigError for what cannot be read, is none of vLLM's, or is not the user's to choose.
    """
    options: dict[str, Any] = {}
    for text in written:
        name, sign, right = (part.strip() for part in text.partition("="))
        if not sign or not name:
            raise ConfigError(f"cannot read {text!r} in engine.options; write name=value, as in 'block_size=32'")
        name = name.replace("-", "_")
        _check(name, known)
        if name in options:
            raise ConfigError(f"cannot set {name} in engine.options twice; leave one of them out")
        try:
            options[name] = tomllib.loads(f"value = {right}")["value"]
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(
                f"cannot read {text!r} in engine.options: {error}; its right side is TOML, text in quotes"
            ) from error
    return options


def _check(name: str, known: Collection[str]) -> None:
    if name in _SETTING:
        raise ConfigError(f"cannot set {name} in engine.options: {_SETTING[name]} decides it; set that instead")
    if name in _FIXED:
        raise ConfigError(f"cannot set {name} in engine.options: {_FIXED[name]}; leave it out")
    if name in _NOT_YET:
        raise ConfigError(f"cannot set {name} in engine.options: {_NOT_YET[name]} is not supported yet; leave it out")
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else "see vLLM's engine arguments"
        raise ConfigError(f"cannot set {name} in engine.options: the installed vLLM has no such option; {hint}")
