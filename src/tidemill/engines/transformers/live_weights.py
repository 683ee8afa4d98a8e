"""The engine's own copy of the weights: one slab of bytes on the device, in which every parameter is a view.

A sleep gives the slab's memory back and keeps the tensor objects; they must not be read until it is allocated again.
Buffers that the model computes lie in the slab too, and are written anew at each allocation. Weights are not: what an
allocation brings back is room, with anything in it.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tidemill.engines.common.arrivals import Arrivals
from tidemill.engines.common.stored import stored_weights
from tidemill.errors import ResidencyError, WeightSyncError
from tidemill.models.naming import model_naming
from tidemill.models.skeleton import computed_buffers
from tidemill.residency.device_memory import check_not_lent
from tidemill.residency.leaks import Kept, own
from tidemill.weights.grouped_copies import GroupedCopies

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LiveWeights"]

# Where CUDA's allocator would put a tensor of its own; vectorised loads rely on it.
_ALIGNMENT = 256


class LiveWeights:
    """Owns the parameters and buffers of `model`, which comes on the meta device; nothing is allocated at first."""

    def __init__(self, *, model: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._model = model
        self._naming = model_naming(model)
        self._buffers = computed_buffers(model)
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._layout: dict[str, tuple[int, torch.dtype, torch.Size]] = {}
        self.nbytes = 0
        for name, shape in shapes.items():
            self._place(name, dtype, shape)
        for name, buffer in self._buffers.items():
            self._place(name, buffer.dtype, buffer.shape)
        self._slab = torch.empty(0, dtype=torch.uint8, device=device)
        self._views: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._arrivals = Arrivals(self._naming.names)
        own(self)

    def kept(self) -> Iterable[Kept]:
        """For the account of what is on a device; the copies on the host too."""
        tensors = [*self._buffers.values(), *([self._slab] if self.resident else [])]
        return [Kept(tensor) for tensor in tensors]

    def _place(self, name: str, dtype: torch.dtype, shape: torch.Size) -> None:
        self._layout[name] = (self.nbytes, dtype, shape)
        self.nbytes += _aligned(shape.numel() * dtype.itemsize)

    def _install(self) -> None:
        """Put views of the slab where the model had tensors on the meta device."""
        views = {name: _view(self._slab, *place) for name, place in self._layout.items()}
        parameters = {
            id(parameter): torch.nn.Parameter(views[name], requires_grad=False)
            for name, parameter in self._model.named_parameters()
        }
        for path, module in self._model.named_modules():
            # One Parameter object for all places of a tied one.
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, parameters[id(parameter)])
            for name, _ in list(module.named_buffers(recurse=False)):
                setattr(module, name, views[f"{path}.{name}"])
        self._weights = dict(self._naming.split_all((name, views[name]) for name in self._naming.shapes))
        self._views = views

    @property
    def resident(self) -> bool:
        """Whether the slab is allocated."""
        return bool(self._slab.untyped_storage().nbytes())

    @property
    def names(self) -> tuple[str, ...]:
        """Hugging Face names of all weights, tied ones once."""
        return tuple(self._naming.names)

    @property
    def host_bytes(self) -> int:
        """Bytes of the computed buffers, of which a copy stays on the host."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def allocate(self) -> None:
        """Allocate the slab and write the computed buffers; nothing happens when it is there already."""
        if self.resident:
            return
        try:
            self._allocate()
        except BaseException:
            # It would pass for one that is ready, with anything in its buffers.
            self.release()
            raise

    def _allocate(self) -> None:
        if self._views:
            self._slab.untyped_storage().resize_(self.nbytes)
        else:
            self._slab = torch.empty(self.nbytes, dtype=torch.uint8, device=self._slab.device)
            self._install()
        for name, buffer in self._buffers.items():
            self._views[name].copy_(buffer)

    def check_can_release(self) -> None:
        """Raises ResidencyError when the slab is lent to somebody, whom `release` would leave without memory."""
        try:
            check_not_lent(self._slab)
        except ResidencyError as error:
            raise ResidencyError(f"cannot release the engine's weights: {error}") from error

    def release(self) -> None:
        """Free the slab."""
        self._slab.untyped_storage().resize_(0)

    def begin(self) -> None:
        """Wait for every weight from now on, whatever came before."""
        self._arrivals.begin()

    def load(self, tensors: "Iterable[tuple[str, Tensor]]") -> None:
        """Copy weights in, casting, as they come or some at a time: a source may make each as it is asked for it.

        Raises WeightSyncError at the first name or shape that does not fit, or that has come since `begin`, before that
        tensor is copied; what was copied by then stays.
        """
        with GroupedCopies() as copies:
            for name, tensor in tensors:
                self._arrivals.check(name)
                view = self._weights[name]
                if tensor.shape != view.shape:
                    raise WeightSyncError(
                        f"cannot load {name} into the engine: it came as {tuple(tensor.shape)} and should be "
                        f"{tuple(view.shape)}; trainer and engine must be built from the same model folder"
                    )
                copies.add(view, tensor)
                self._arrivals.add(name)

    def missing(self) -> tuple[str, ...]:
        """Names of the weights that have not come since `begin`."""
        return self._arrivals.missing()

    def views(self) -> "Mapping[str, Tensor]":
        """Every weight, by name, as it lies in the slab."""
        return dict(self._weights)

    def stored(self, folder: Path) -> "Iterator[tuple[str, Tensor]]":
        """The folder's weights under the names that `load` takes. Raises DataError when there are none."""
        return stored_weights(folder, self._naming)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _view(slab: "Tensor", start: int, dtype: torch.dtype, shape: torch.Size) -> "Tensor":
    return slab[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
