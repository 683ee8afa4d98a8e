"""Pickles of torch read without running anything that they name: the one module that imports pickle.

Only the child process of `tidemill.checkpoint.foreign.child` imports it. A pickle is a program that calls what it finds
by name. Here every name stands for a record of ours, and one that is not in the list ends the reading: nothing of
torch, nothing of the system and no attribute of anything can be reached.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

__all__ = ["ForbiddenError", "ForeignTensor", "Record", "StorageKey", "read_pickle"]

_STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "UntypedStorage": "",
}
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"),
}  # fmt: skip


class ForbiddenError(Exception):
    """The pickle wants what no weights need; the message names it."""


@dataclass(frozen=True)
class StorageKey:
    """A storage that lies in the entry `key` of its archive; `dtype` is empty for one that does not say it."""

    key: str
    dtype: str


@dataclass(frozen=True)
class ForeignTensor:
    """`shape` and `strides` and `offset` are in elements of the storage."""

    storage: StorageKey
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Record:
    """Stands for an object of a class that is known by name: what it was made of, and the state that it was given."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def field(self, name: str) -> Any:
        """A field of a data class. Raises ForbiddenError when it is not there."""
        if not isinstance(self.state, Mapping) or name not in self.state:
            raise ForbiddenError(f"a {type(self).__name__} without {name}")
        return self.state[name]


def read_pickle(data: bytes) -> Any:
    """What the pickle holds, as plain values, `Record` and `ForeignTensor`. Raises ForbiddenError for anything else."""
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except ForbiddenError:
        raise
    except Exception as error:  # whatever a damaged or a hostile program does to the machine that runs it
        raise ForbiddenError(f"something that is no pickle of weights ({type(error).__name__}: {error})") from error


def _record(name: str) -> type[Record]:
    return type(name, (Record,), {})


def _rebuild_v2(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> ForeignTensor:
    key = _checked(storage)
    return _tensor(key, key.dtype, offset, shape, strides)


def _rebuild_v3(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> ForeignTensor:
    _requires_grad, _hooks, dtype, *_ = rest
    return _tensor(_checked(storage), dtype, offset, shape, strides)


def _tensor(storage: StorageKey, dtype: Any, offset: Any, shape: Any, strides: Any) -> ForeignTensor:
    numbers = (offset, *shape, *strides)
    if dtype not in _DTYPES.values() or len(shape) != len(strides) or len(shape) > 64:
        raise ForbiddenError("a tensor without dtype, or of another rank than its strides")
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        raise ForbiddenError("a tensor of other sizes than whole numbers from 0 up")
    return ForeignTensor(storage, dtype, offset, tuple(shape), tuple(strides))


def _rebuild_parameter(data: Any, *rest: Any) -> ForeignTensor:
    if not isinstance(data, ForeignTensor):
        raise ForbiddenError("a parameter without a tensor")
    return data


def _checked(storage: Any) -> StorageKey:
    if not isinstance(storage, StorageKey):
        raise ForbiddenError("a tensor without a storage")
    return storage


def _size(*values: Any) -> tuple[Any, ...]:
    return tuple(*values)


class _StorageType(str):
    """The class of a storage: its dtype. Called by nobody."""


def _allowed() -> Mapping[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {
        ("collections", "OrderedDict"): OrderedDict,
        ("torch", "Size"): _size,
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild_v2,
        ("torch._utils", "_rebuild_tensor_v3"): _rebuild_v3,
        ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    }
    found |= {(module, name): _record(name) for module, names in _RECORDS.items() for name in names}
    for name, dtype in _STORAGES.items():
        found |= {("torch", name): _StorageType(dtype), ("torch.storage", name): _StorageType(dtype)}
    return found | {("torch", name): dtype for name, dtype in _DTYPES.items()}


class _Unpickler(pickle.Unpickler):
    allowed = _allowed()

    def find_class(self, module: str, name: str) -> Any:
        """Raises ForbiddenError for what is not in the list."""
        try:
            return self.allowed[module, name]
        except KeyError:
            raise ForbiddenError(f"{module}.{name}, which is nothing that weights are made of") from None

    def persistent_load(self, told: Any) -> StorageKey:
        """A storage, by the key of its archive's entry."""
        match told:
            case ("storage", _StorageType() as dtype, str(key), str(), *_):
                return StorageKey(key, str(dtype))
        _refuse(told)


def _refuse(told: Any) -> NoReturn:
    raise ForbiddenError(f"a persistent id that is no storage ({str(told)[:80]!r})")
