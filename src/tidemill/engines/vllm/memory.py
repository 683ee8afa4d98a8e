"""Device memory that vLLM's weights and cache lie in: given back and taken again while its tensors stay objects.

On a GPU by vLLM's own allocator, which keeps the addresses that its captured graphs hold; on a CPU, where vLLM has no
such thing, by emptying the storages. What comes back is room, with anything in it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from tidemill.contracts.footprint import Part
from tidemill.errors import ResidencyError
from tidemill.residency.device_memory import check_not_lent
from tidemill.residency.leaks import Kept, own

__all__ = ["EngineMemory", "HostRooms", "MappedRooms", "Rooms"]

_TAGS = {Part.WEIGHTS: "weights", Part.KV_CACHE: "kv_cache"}


class Rooms(Protocol):
    """The memory of one part, or of the other."""

    def size(self, part: Part) -> int:
        """Bytes, there or not."""
        ...

    def check_can_release(self, part: Part) -> None:
        """Raises ResidencyError when somebody else's tensors lie in it."""
        ...

    def release(self, part: Part) -> None:
        """Give it back."""
        ...

    def take(self, part: Part) -> None:
        """Get it again. Raises what the allocator raises, and then it is as before."""
        ...

    def kept(self, present: Part) -> Iterable[Kept]:
        """A tensor of each storage that counts, when the parts in `present` are there."""
        ...


class HostRooms:
    """Storages of a CPU."""

    def __init__(self, tensors: Mapping[Part, Sequence[torch.Tensor]]) -> None:
        self._tensors = {part: _one_each(found) for part, found in tensors.items()}
        self._sizes = {
            part: [tensor.untyped_storage().nbytes() for tensor in found] for part, found in self._tensors.items()
        }

    def size(self, part: Part) -> int:
        """See Rooms."""
        return sum(self._sizes[part])

    def check_can_release(self, part: Part) -> None:
        """See Rooms."""
        for tensor in self._tensors[part]:
            check_not_lent(tensor)

    def release(self, part: Part) -> None:
        """See Rooms."""
        for tensor in self._tensors[part]:
            tensor.untyped_storage().resize_(0)

    def take(self, part: Part) -> None:
        """See Rooms."""
        try:
            for tensor, size in zip(self._tensors[part], self._sizes[part], strict=True):
                tensor.untyped_storage().resize_(size)
        except BaseException:
            self.release(part)
            raise

    def kept(self, present: Part) -> Iterable[Kept]:
        """See Rooms."""
        return [Kept(tensor) for part in self._tensors if part in present for tensor in self._tensors[part]]


class MappedRooms:
    """What vLLM's allocator has mapped on a GPU, by its tags. PyTorch counts it as there even while it is not."""

    def __init__(self, tensors: Mapping[Part, Sequence[torch.Tensor]]) -> None:
        from vllm.device_allocator import cumem

        self._cumem: Any = cumem
        self._allocator: Any = cumem.CuMemAllocator.get_instance()
        self._tensors = {part: _one_each(found) for part, found in tensors.items()}

    def size(self, part: Part) -> int:
        """See Rooms."""
        return sum(data.handle[1] for data in self._mapped(part))

    def check_can_release(self, part: Part) -> None:
        """A GPU's memory is lent to nobody."""

    def release(self, part: Part) -> None:
        """See Rooms."""
        torch.cuda.synchronize()
        for data in self._mapped(part):
            self._cumem.unmap_and_release(data.handle)
            _mark(data, asleep=True)

    def take(self, part: Part) -> None:
        """See Rooms."""
        taken: list[Any] = []
        try:
            for data in self._mapped(part):
                self._cumem.create_and_map(data.handle)
                taken.append(data)
        except BaseException:
            for data in taken:
                self._cumem.unmap_and_release(data.handle)
            raise
        for data in taken:
            _mark(data, asleep=False)

    def kept(self, present: Part) -> Iterable[Kept]:
        """See Rooms."""
        found = []
        for part, tensors in self._tensors.items():
            absent = 0 if part in present else self.size(part)
            found += [Kept(tensors[0], absent=absent), *(Kept(tensor) for tensor in tensors[1:])]
        return found

    def _mapped(self, part: Part) -> list[Any]:
        return [data for data in self._allocator.pointer_to_data.values() if data.tag == _TAGS[part]]


def _mark(data: Any, *, asleep: bool) -> None:
    """Later versions of the allocator note it, so that memory which is freed asleep is not unmapped twice."""
    if "is_asleep" in vars(data):
        data.is_asleep = asleep


def _one_each(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list({tensor.untyped_storage()._cdata: tensor for tensor in tensors}.values())


class EngineMemory:
    """Which parts are there, and the buffers that a model computed when it was made: no weight brings them back."""

    def __init__(self, rooms: Rooms, buffers: Mapping[str, torch.Tensor]) -> None:
        self._rooms = rooms
        self._buffers = [(buffer, buffer.detach().cpu().clone()) for buffer in buffers.values()]
        self.present = Part.WEIGHTS | Part.KV_CACHE
        self._sizes = {part: rooms.size(part) for part in self.present}
        own(self)

    def kept(self) -> Iterable[Kept]:
        """For the account of what is on a device; the copies on the host too."""
        return [*self._rooms.kept(self.present), *(Kept(copy) for _, copy in self._buffers)]

    @property
    def host_bytes(self) -> int:
        """Of the copies of buffers."""
        return sum(copy.nbytes for _, copy in self._buffers)

    def size(self, part: Part) -> int:
        """Bytes of the parts in `part`."""
        return sum(size for one, size in self._sizes.items() if one in part)

    def wake(self, part: Part) -> Part:
        """Take what of `part` is not there; what was taken. Raises ResidencyError, and then all is as before."""
        wanted = list(part & ~self.present & (Part.WEIGHTS | Part.KV_CACHE))
        taken = Part.NONE
        try:
            for one in wanted:
                self._rooms.take(one)
                taken |= one
        except (RuntimeError, MemoryError) as error:
            for one in taken:
                self._rooms.release(one)
            raise ResidencyError(
                f"cannot wake engine ({part.words()}): {self.size(part)} bytes could not be allocated: {error}; lower "
                "residency.budget, engine.kv_memory or engine.max_batch, or use a smaller model"
            ) from error
        self.present |= taken
        if Part.WEIGHTS in taken:
            self._restore_buffers()
        return taken

    def check_can_sleep(self) -> None:
        """Raises ResidencyError when the memory is lent to somebody."""
        for part in self.present:
            try:
                self._rooms.check_can_release(part)
            except ResidencyError as error:
                raise ResidencyError(f"cannot release the engine's {part.words()}: {error}") from error

    def sleep(self) -> None:
        """Give everything back."""
        for part in self.present:
            self._rooms.release(part)
            self.present &= ~part

    def _restore_buffers(self) -> None:
        with torch.no_grad():
            for buffer, copy in self._buffers:
                buffer.copy_(copy)
