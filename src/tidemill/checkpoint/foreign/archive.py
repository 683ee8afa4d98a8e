"""Where the tensors of a torch archive lie: a zip file, whole or in the middle of another file.

Runs in the child process alone. Nothing is unpacked: torch stores bytes as they are, so that they are mapped later.
"""

import io
import math
import struct
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from tidemill.checkpoint.foreign.unpickler import ForbiddenError, ForeignTensor, read_pickle
from tidemill.checkpoint.safetensors_header import ITEM_BYTES

__all__ = ["archived_tensors"]

_LARGEST_PICKLE = 512 << 20
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_DEEPEST = 32


def archived_tensors(file: BinaryIO, begin: int, length: int) -> dict[str, Any]:
    """Of the archive in bytes `[begin, begin + length)`: its tensors by dotted name, "" for one that is all of it.

    Each with `dtype`, `shape`, `strides` (elements) and `begin`, the byte of its first element in the file. `others`
    counts the values that are none. Raises ForbiddenError for what is no such archive, or tries what no weights need.
    """
    window = _Window(file, begin, length)
    try:
        with zipfile.ZipFile(window) as archive:
            return _tensors(archive, window)
    except (zipfile.BadZipFile, struct.error, EOFError, NotImplementedError, ValueError, OSError) as error:
        raise ForbiddenError(f"something that is no torch archive, or of before torch 1.6 ({error})") from error


class _Window(io.RawIOBase):
    """A stretch of a file as a file."""

    def __init__(self, file: BinaryIO, begin: int, length: int) -> None:
        self._file, self.begin, self._length, self._at = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, start + offset)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._length - self._at)
        count = left if size is None or size < 0 else min(size, left)
        self._file.seek(self.begin + self._at)
        data = self._file.read(count)
        self._at += len(data)
        return data


def _tensors(archive: zipfile.ZipFile, window: _Window) -> dict[str, Any]:
    names = [name for name in archive.namelist() if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(names) != 1:
        raise ForbiddenError(f"an archive with {len(names)} data.pkl in it; torch writes one")
    root = names[0].removesuffix("/data.pkl")
    if f"{root}/byteorder" in archive.namelist() and _small(archive, f"{root}/byteorder") != b"little":
        raise ForbiddenError("numbers of a big-endian machine")
    found, others = {}, 0
    for name, value in _leaves(read_pickle(_small(archive, names[0])), 0):
        if isinstance(value, ForeignTensor):
            found[name] = _located(value, root, archive, window)
        else:
            others += 1
    return {"tensors": found, "others": others}


def _small(archive: zipfile.ZipFile, name: str) -> bytes:
    info = _stored(archive, name)
    if info.file_size > _LARGEST_PICKLE:
        raise ForbiddenError(f"{name} of {info.file_size} bytes, for which {_LARGEST_PICKLE} are enough")
    return archive.read(info)


def _stored(archive: zipfile.ZipFile, name: str) -> zipfile.ZipInfo:
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise ForbiddenError(f"no entry {name} in its archive; the file is cut short") from None
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise ForbiddenError(f"a packed entry {name}, as torch writes none")
    return info


def _leaves(value: Any, depth: int, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if depth > _DEEPEST:
        raise ForbiddenError(f"tables in tables more than {_DEEPEST} deep")
    if not isinstance(value, Mapping):
        yield prefix, value
        return
    for name, item in value.items():
        if isinstance(name, str):
            yield from _leaves(item, depth + 1, f"{prefix}.{name}" if prefix else name)


def _located(tensor: ForeignTensor, root: str, archive: zipfile.ZipFile, window: _Window) -> dict[str, Any]:
    info = _stored(archive, f"{root}/data/{tensor.storage.key}")
    window.seek(info.header_offset)
    signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(window.read(_LOCAL_HEADER.size))
    start = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    item = ITEM_BYTES[tensor.dtype]
    last = tensor.offset + sum((side - 1) * stride for side, stride in zip(tensor.shape, tensor.strides, strict=True))
    if signature != b"PK\x03\x04" or (math.prod(tensor.shape) and (last + 1) * item > info.file_size):
        raise ForbiddenError(f"a tensor beyond the end of its storage {tensor.storage.key}")
    return {
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "strides": tensor.strides,
        "begin": window.begin + start + tensor.offset * item,
    }
