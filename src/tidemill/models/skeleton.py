"""A model without weights, made from the config of a folder: local files only, no code from the folder."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tidemill.errors import DataError

__all__ = ["computed_buffers", "model_skeleton"]


def model_skeleton(folder: Path, dtype: torch.dtype) -> Any:
    """A causal language model on the meta device, in eval mode, tied as its config says, without dropout.

    Attention goes through torch's own kernels, except where scores are capped, which these cannot. Raises DataError.
    """
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise DataError(f"cannot load a model from {folder}: there is no config.json; name a Hugging Face model folder")
    try:
        json.loads(config_file.read_text(encoding="utf-8"))
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config.attention_dropout = 0.0
        capped = config.to_dict().get("attn_logit_softcapping") is not None
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="eager" if capped else "sdpa", trust_remote_code=False
            )
    except (ValueError, KeyError, OSError) as error:
        raise DataError(
            f"cannot build a causal language model from {config_file}: {error}; only architectures that transformers "
            f"knows by itself can be used"
        ) from error
    model.tie_weights()
    return model.eval()


def computed_buffers(model: Any) -> dict[str, torch.Tensor]:
    """Every buffer that the model computes instead of storing (rotary frequencies), on CPU, by its full name.

    On the meta device they were never computed, and no file holds them. The modules that own them are built once
    more, for real: they take the config and are small. Embeddings that scale know by what. Raises DataError for a
    buffer that cannot be had this way.
    """
    buffers: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        names = [name for name, _ in module.named_buffers(recurse=False)]
        if not names:
            continue
        if names == ["embed_scale"] and "scalar_embed_scale" in vars(module):
            buffers[f"{path}.embed_scale"] = torch.tensor(module.scalar_embed_scale)
            continue
        try:
            fresh = type(module)(config=model.config)
        except TypeError as error:
            raise DataError(
                f"cannot compute the buffers {', '.join(names)} of {path} ({type(module).__name__}): {error}; this "
                f"architecture is not supported"
            ) from error
        found = dict(fresh.named_buffers(recurse=False))
        buffers.update({f"{path}.{name}": found[name].detach() for name in names})
    return buffers
