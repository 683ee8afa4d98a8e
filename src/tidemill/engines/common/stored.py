"""The weights that a model folder holds, as an engine takes them."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from tidemill.errors import DataError
from tidemill.models.stored import COMPUTED
from tidemill.names.naming import Naming

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["stored_weights"]


def stored_weights(folder: Path, naming: Naming) -> "Iterator[tuple[str, Tensor]]":
    """Every tensor in the folder's safetensors files under its Hugging Face name, read one after the other.

    A tied tensor may lie there under any of its names, or under several: then the one that is kept counts. What memory
    joins may be joined there too. Raises DataError when there are no files.
    """
    there = frozenset(name for tensors in _files(folder) for name in tensors.keys())  # noqa: SIM118
    for tensors in _files(folder):
        for name in tensors.keys():  # noqa: SIM118  (safe_open is no mapping)
            kept = naming.tied.get(name, name)
            if name.endswith(COMPUTED) or (kept != name and kept in there):
                continue
            tensor = tensors.get_tensor(name)
            if tuple(tensor.shape) == naming.shapes.get(kept):
                yield from naming.split(kept, tensor)
            else:
                yield name, tensor


def _files(folder: Path) -> Iterator[Any]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError(
            f"cannot load weights from {folder}: no safetensors file; convert it with `tidemill model import`"
        )
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            yield tensors
