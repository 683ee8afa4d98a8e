"""What differs between two checkpoints: settings, state, and every tensor."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tidemill.checkpoint.changes import changed_settings
from tidemill.checkpoint.manifest import STATE
from tidemill.checkpoint.numbers import Change, change_of
from tidemill.checkpoint.safetensors_header import ITEM_BYTES
from tidemill.checkpoint.stored import StoredCheckpoint
from tidemill.contracts.checkpoint import SavedTensor

__all__ = ["Difference", "TensorDifference", "compared_bytes", "difference"]


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """`how` is `only in the first`, `only in the second`, `another shape`, `another dtype` or `changed`.

    `text` has the shapes or dtypes; `change` is there where the shapes are the same and the values are not.
    """

    part: str
    name: str
    how: str
    text: str
    change: Change | None = None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Each list is empty when nothing of its kind differs. Texts are `path: first -> second`.

    `beside` is what differs and says nothing about the contents: attempt and versions of libraries.
    """

    settings: tuple[str, ...]
    identity: tuple[str, ...]
    state: tuple[str, ...]
    tensors: tuple[TensorDifference, ...]
    beside: tuple[str, ...]
    same_tensors: int

    @property
    def equal(self) -> bool:
        """Whether both hold the same."""
        return not (self.settings or self.identity or self.state or self.tensors)


def compared_bytes(first: StoredCheckpoint) -> int:
    """What `difference` reads of the first one, at most: for a bar."""
    return first.manifest.total_bytes


def difference(
    first: StoredCheckpoint, second: StoredCheckpoint, advance: Callable[[int], None] = lambda count: None
) -> Difference:
    """Compares every byte of both. `advance` is told of bytes of the first one read."""
    tensors = list(_tensors(first, second, advance))
    changed = tuple(one for one in tensors if isinstance(one, TensorDifference))
    mine, other = first.manifest, second.manifest
    attempts = ({"attempt": mine.attempt}, {"attempt": other.attempt})
    return Difference(
        settings=tuple(changed_settings(_settings(first), _settings(second))),
        identity=tuple(changed_settings(mine.identity, other.identity)),
        state=tuple(changed_settings(_state(first), _state(second))),
        tensors=changed,
        beside=tuple(changed_settings(*attempts) + changed_settings(mine.versions, other.versions)),
        same_tensors=len(tensors) - len(changed),
    )


def _settings(stored: StoredCheckpoint) -> Mapping[str, Any]:
    settings = stored.manifest.settings.get("settings", {})
    return settings if isinstance(settings, Mapping) else {}


def _state(stored: StoredCheckpoint) -> dict[str, Any]:
    """The run's state but for the attempt, and the small things of each part."""
    state: dict[str, Any] = json.loads((stored.path / STATE).read_bytes())
    return {"run": {**state["run"], "attempt": None}, **state["parts"]}


def _tensors(
    first: StoredCheckpoint, second: StoredCheckpoint, advance: Callable[[int], None]
) -> Iterator[TensorDifference | bool]:
    """One for each tensor of either: True where it is the same."""
    for part in sorted({*first.parts, *second.parts}):
        mine = first.parts[part].tensors if part in first.parts else {}
        other = second.parts[part].tensors if part in second.parts else {}
        for name in sorted({*mine, *other}):
            if name not in mine or name not in other:
                held, where = (mine[name], "first") if name in mine else (other[name], "second")
                text = f"{held.dtype} {list(held.shape)}"
                yield TensorDifference(part=part, name=name, how=f"only in the {where}", text=text)
            else:
                yield _compared(part, name, mine[name], other[name], advance) or True


def _compared(
    part: str, name: str, mine: SavedTensor, other: SavedTensor, advance: Callable[[int], None]
) -> TensorDifference | None:
    if tuple(mine.shape) != tuple(other.shape):
        text = f"{list(mine.shape)} -> {list(other.shape)}"
        return TensorDifference(part=part, name=name, how="another shape", text=text)
    known = mine.dtype in ITEM_BYTES and other.dtype in ITEM_BYTES
    change = change_of(mine, other, advance) if known else None
    if mine.dtype != other.dtype:
        text = f"{mine.dtype} -> {other.dtype}"
        return TensorDifference(part=part, name=name, how="another dtype", text=text, change=change)
    if change is None:
        return None
    return TensorDifference(part=part, name=name, how="changed", text="", change=change)
