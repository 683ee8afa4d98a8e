"""Element types of an engine's weights, by name."""

import torch

from tidemill.errors import WeightSyncError

__all__ = ["stored_name", "torch_dtype"]

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_STORED = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def torch_dtype(name: str) -> torch.dtype:
    """PyTorch's dtype of that name. Raises WeightSyncError for one that weights are not cast to."""
    if name not in _DTYPES:
        raise WeightSyncError(f"cannot cast weights to the engine's dtype {name!r}; use one of {list(_DTYPES)}")
    return _DTYPES[name]


def stored_name(dtype: torch.dtype) -> str:
    """Safetensors' name of a dtype that weights have; PyTorch's own of any other."""
    return _STORED.get(dtype, str(dtype))
