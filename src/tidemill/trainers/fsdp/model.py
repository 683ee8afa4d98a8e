"""A causal language model of transformers, as the trainer computes with it.

Parameters are float32 masters; the forward pass runs in the compute dtype by autocast. `B` rows of `T` tokens, `M` of
them predicted from, `V` words.
"""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from tidemill.errors import DataError
from tidemill.trainers.common.logprobs import token_logprobs
from tidemill.trainers.common.padding import PaddedRows

__all__ = ["ComputeDtype", "PolicyModel", "load_network"]

ComputeDtype = Literal["float32", "bfloat16"]
_MODEL_TYPES = ("llama", "qwen2", "qwen3")


class PolicyModel:
    """Log-probs of a network's tokens. Only tokens asked for meet the word matrix: prompts cost no logits."""

    def __init__(self, network: Any, *, device: torch.device, compute_dtype: ComputeDtype) -> None:
        self._network = network
        self.words: int = self._network.config.vocab_size
        self._device = device
        self._dtype = getattr(torch, compute_dtype)

    def logprobs(self, rows: PaddedRows, places: Int64[Tensor, " M"], *, temperature: float) -> Float[Tensor, " M"]:
        """Log-prob of the targets at `places` of the flattened rectangle, in nats, float32, with gradient."""
        with torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype != torch.float32):
            hidden = self._network.get_decoder()(input_ids=rows.input_ids, use_cache=False).last_hidden_state
            logits = self._network.get_output_embeddings()(hidden.flatten(0, 1).index_select(0, places))
        return token_logprobs(logits, rows.target_ids.flatten().index_select(0, places), temperature=temperature)


def load_network(folder: Path, *, device: torch.device, recompute: bool) -> torch.nn.Module:
    """The model in `folder`, float32, in train mode without dropout; nothing is downloaded and no code of it is run.

    `recompute` keeps only the inputs of each layer for the backward pass. Raises DataError when the folder holds no
    model of a known type, or not all of its weights.
    """
    try:
        with _quiet():
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            _check_type(folder, config.model_type)
            config.attention_dropout = 0.0
            network, info = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                attn_implementation="sdpa",
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"cannot load a model from {folder}: {error}; `model` must name a folder with config.json and safetensors"
        ) from error
    _check_weights(folder, info)
    if recompute:
        _recompute_layers(network)
    module: torch.nn.Module = network.to(device).train()
    return module


def _check_type(folder: Path, model_type: str) -> None:
    if model_type not in _MODEL_TYPES:
        raise DataError(
            f'cannot train the model in {folder}: its type is {model_type!r}, and trainer.use = "fsdp" knows '
            f"{', '.join(_MODEL_TYPES)}; choose a model of one of these"
        )


def _check_weights(folder: Path, info: dict[str, Any]) -> None:
    # transformers fills a missing weight with random numbers and a warning.
    wrong = {name: sorted(map(str, info[f"{name}_keys"])) for name in ("missing", "unexpected", "mismatched")}
    found = [f"{len(keys)} {name} ({keys[0]} ...)" for name, keys in wrong.items() if keys]
    if found:
        raise DataError(
            f"cannot train the model in {folder}: its weights do not fit its config.json: {', '.join(found)}; "
            "download or convert it again"
        )


def _recompute_layers(network: Any) -> None:
    with warnings.catch_warnings():
        # From 5.24 on the method has another name; 5.17 knows this one only.
        warnings.simplefilter("ignore", FutureWarning)
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of transformers: the run has its own."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
