"""Names of element types in safetensors files."""

import torch

from tidemill.errors import ResidencyError

__all__ = ["dtype_name"]

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
}


def dtype_name(dtype: torch.dtype) -> str:
    """`F32` for `torch.float32`. Raises ResidencyError for a type that a safetensors file cannot hold."""
    if dtype not in _NAMES:
        raise ResidencyError(f"cannot keep a tensor of {dtype}: safetensors has no name for it; use a real dtype")
    return _NAMES[dtype]
