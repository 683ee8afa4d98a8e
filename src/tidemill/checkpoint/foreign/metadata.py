"""What the `.metadata` of a torch.distributed.checkpoint says: names, shapes, and in which files the pieces lie.

Runs in the child process alone.
"""

from collections.abc import Mapping
from typing import Any

from tidemill.checkpoint.foreign.unpickler import ForbiddenError, Record, read_pickle

__all__ = ["listed_tensors"]


def listed_tensors(data: bytes) -> dict[str, Any]:
    """Tensors by name, each with `dtype`, `shape` and `chunks` (`offset`, `shape`, `file`, `begin`, `length`).

    `others` counts what is saved beside tensors. Raises ForbiddenError for anything that is no such metadata.
    """
    metadata = read_pickle(data)
    if not isinstance(metadata, Record) or type(metadata).__name__ != "Metadata":
        raise ForbiddenError("something else than the metadata of a torch.distributed.checkpoint")
    places = _places(_table(metadata.field("storage_data")))
    entries = _table(metadata.field("state_dict_metadata"))
    found = {}
    for name, entry in entries.items():
        if isinstance(entry, Record) and type(entry).__name__ == "TensorStorageMetadata":
            found[_text(name)] = _tensor(_text(name), entry, places)
    return {"tensors": found, "others": len(entries) - len(found)}


def _places(storage: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...]], dict[str, Any]]:
    """By name and offset of the piece."""
    found = {}
    for index, info in storage.items():
        if not isinstance(index, Record) or not isinstance(info, Record):
            raise ForbiddenError("pieces that lie in no files of torch's own storage")
        state = _table(info.state)
        if state.get("transform_descriptors"):
            raise ForbiddenError(
                f"pieces written through {state['transform_descriptors']}, which cannot be undone here"
            )
        at = _table(index.state).get("offset")
        found[_text(index.field("fqn")), _numbers(at or ())] = {
            "file": _text(info.field("relative_path")),
            "begin": _numbers((info.field("offset"),))[0],
            "length": _numbers((info.field("length"),))[0],
        }
    return found


def _tensor(name: str, entry: Record, places: Mapping[tuple[str, tuple[int, ...]], dict[str, Any]]) -> dict[str, Any]:
    properties = entry.field("properties")
    state = properties.state if isinstance(properties, Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else _table(state).get("dtype")
    chunks = []
    for chunk in entry.field("chunks"):
        if not isinstance(chunk, Record):
            raise ForbiddenError(f"a piece of {name} that says nothing of itself")
        offset, shape = _numbers(chunk.field("offsets")), _numbers(chunk.field("sizes"))
        if (name, offset) not in places:
            raise ForbiddenError(f"a piece of {name} at {list(offset)} that lies in no file")
        chunks.append({"offset": offset, "shape": shape, **places[name, offset]})
    return {"dtype": _text(dtype), "shape": _numbers(entry.field("size")), "chunks": chunks}


def _table(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ForbiddenError("metadata with something else where a table belongs")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ForbiddenError(f"metadata with {value!r:.80} where a text belongs")
    return value


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or not all(type(n) is int and 0 <= n < 1 << 62 for n in values):
        raise ForbiddenError("metadata with something else where whole numbers from 0 up belong")
    return tuple(values)
