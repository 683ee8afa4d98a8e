"""What a tenant says must survive sleep, checked as it comes in."""

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tidemill.contracts.footprint import Part
from tidemill.errors import ResidencyError
from tidemill.residency.dtypes import dtype_name
from tidemill.residency.packing import Registered
from tidemill.residency.sharded import ShardedParameters

__all__ = ["Registration"]

# Storage, offset, shape, stride, dtype: tensors that agree in these are one.
_Place = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype]


class Registration:
    """Tensors on one device, by name. Tensors that are the same elements are kept once, with aliases."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._items: dict[str, Registered] = {}
        self._places: dict[_Place, str] = {}
        self._sharded = ShardedParameters()
        self._open = True

    def close(self) -> None:
        """Forget all; nothing can be added any more."""
        self._items, self._places, self._sharded, self._open = {}, {}, ShardedParameters(), False

    def follow(self, module: nn.Module) -> None:
        """Allow parameters of `module` that FSDP2 shards to be added."""
        self._sharded.follow(module)

    def items(self) -> list[Registered]:
        """In the order of registration."""
        return list(self._items.values())

    def bases(self) -> list[Registered]:
        """Tensors that nobody registered and that registered views keep alive: they move along, without an entry.

        Left behind they would keep the old memory, and would no longer share it with their views. FSDP2's padded
        buffers are such.
        """
        known = {id(tensor) for item in self._items.values() for tensor in (item.tensor, *item.aliases)}
        found: dict[int, Registered] = {}
        for item in self._items.values():
            buffers = () if item.buffer is None else (item.buffer,)
            bases = (view._base for view in (item.tensor, *item.aliases, *buffers))
            for base in (*buffers, *bases):
                if base is not None and id(base) not in known:
                    found[id(base)] = Registered(name=f"{item.name}, its base", tensor=base, part=item.part)
        return list(found.values())

    def add(
        self,
        name: str,
        tensor: torch.Tensor,
        part: Part,
        *,
        whole: tuple[int, ...] | None = None,
        offset: tuple[int, ...] | None = None,
    ) -> None:
        """Raises ResidencyError for a name used twice, and for a tensor that cannot be moved into memory of ours."""
        if not self._open:
            raise ResidencyError(
                f"cannot register {name!r}: the ledger is frozen, and what is not in it does not survive sleep; "
                "create all state before `freeze`, optimizer state included"
            )
        if name in self._items:
            raise ResidencyError(f"cannot register two tensors as {name!r}; give each its own name")
        if len(part) != 1:
            raise ResidencyError(f"cannot register {name!r} as {part.words()}: a tensor belongs to exactly one part")
        item = self._registered(Registered(name=name, tensor=tensor, part=part, whole=whole, offset=offset))
        self._check_movable(name, item.tensor)
        # A rank may hold no element of a sharded parameter: its buffer still tells which one it is.
        place = _place(item.tensor if item.buffer is None else item.buffer)
        if (item.tensor.numel() == 0 and item.buffer is None) or place not in self._places:
            self._items[name] = item
            self._places[place] = name
            return
        first = self._items[self._places[place]]
        if first.part != part:
            raise ResidencyError(
                f"cannot register {name!r} as {part.words()}: it is {first.name!r}, registered as {first.part.words()}"
            )
        self._items[first.name] = replace(first, aliases=(*first.aliases, item.tensor))

    def _registered(self, item: Registered) -> Registered:
        if isinstance(item.tensor, DTensor):
            piece = self._sharded.piece(item.name, item.tensor)
            return replace(item, tensor=piece.local, buffer=piece.buffer, whole=piece.whole, offset=piece.offset)
        if item.whole is None and item.offset is None:
            return item
        shape = tuple(item.tensor.shape)
        whole, offset = item.whole or (), item.offset or ()
        if not len(whole) == len(offset) == len(shape) or any(
            start < 0 or start + size > end for start, size, end in zip(offset, shape, whole, strict=True)
        ):
            raise ResidencyError(
                f"cannot register {item.name!r}: a piece of shape {list(shape)} does not lie at {list(offset)} in a "
                f"tensor of shape {list(whole)}; give `whole` and `offset` of its parameter"
            )
        return item

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
