"""What a tenant says must survive sleep, checked as it comes in."""

from dataclasses import replace

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tidemill.contracts.footprint import Part
from tidemill.errors import ResidencyError
from tidemill.residency.dtypes import dtype_name
from tidemill.residency.packing import Registered

__all__ = ["Registration"]

# Storage, offset, shape, stride, dtype: tensors that agree in these are one.
_Place = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


class Registration:
    """Tensors on one device, by name. Tensors that are the same elements are kept once, with aliases."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._items: dict[str, Registered] = {}
        self._places: dict[_Place, str] = {}

    def items(self) -> list[Registered]:
        """In the order of registration."""
        return list(self._items.values())

    def bases(self) -> list[Registered]:
        """Tensors that nobody registered and that registered views keep alive: they move along, without an entry.

        Left behind they would keep the old memory, and would no longer share it with their views.
        """
        known = {id(tensor) for item in self._items.values() for tensor in (item.tensor, *item.aliases)}
        found: dict[int, Registered] = {}
        for item in self._items.values():
            for view in (item.tensor, *item.aliases):
                base = view._base
                if base is not None and id(base) not in known:
                    found[id(base)] = Registered(name=f"{item.name}, its base", tensor=base, part=item.part)
        return list(found.values())

    def add(self, name: str, tensor: torch.Tensor, part: Part) -> None:
        """Raises ResidencyError for a name used twice, and for a tensor that cannot be moved into memory of ours."""
        if name in self._items:
            raise ResidencyError(f"cannot register two tensors as {name!r}; give each its own name")
        if len(part) != 1:
            raise ResidencyError(f"cannot register {name!r} as {part.words()}: a tensor belongs to exactly one part")
        self._check_movable(name, tensor)
        place = _place(tensor)
        if tensor.numel() == 0 or place not in self._places:
            self._items[name] = Registered(name=name, tensor=tensor, part=part)
            self._places[place] = name
            return
        first = self._items[self._places[place]]
        if first.part != part:
            raise ResidencyError(
                f"cannot register {name!r} as {part.words()}: it is {first.name!r}, registered as {first.part.words()}"
            )
        self._items[first.name] = replace(first, aliases=(*first.aliases, tensor))

    def _check_movable(self, name: str, tensor: torch.Tensor) -> None:
        dtype_name(tensor.dtype)
        if is_traceable_wrapper_subclass(tensor):
            raise ResidencyError(
                f"cannot register {name!r}: a {type(tensor).__name__} wraps its memory; register the local tensor"
            )
        if tensor.layout != torch.strided or tensor.is_neg():
            raise ResidencyError(f"cannot register {name!r}: only plain strided tensors can be kept")
        if tensor.device != self._device:
            raise ResidencyError(
                f"cannot register {name!r}: it is on {tensor.device} and this saver keeps {self._device}; "
                "create it there, or keep it outside the ledger if it must survive on the host"
            )
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ResidencyError(
                f"cannot register {name!r}: an expanded tensor repeats elements; register a `.clone()`"
            )


def _place(tensor: torch.Tensor) -> _Place:
    storage = tensor.untyped_storage().data_ptr()
    return storage, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype
