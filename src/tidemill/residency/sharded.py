"""Parameters that FSDP2 shards, seen as memory: which elements this rank holds, and the padded buffer they lie in.

A sharded parameter is a DTensor around a view of a flat buffer, padded so that all ranks' are equally long; FSDP2
gathers from the buffer, the optimizer writes through the view. Whoever moves one without the other trains wrongly, in
silence. A saver is used so, after `fully_shard` and when the weights are in place:

    saver.follow(network)
    for name, parameter in network.named_parameters():
        saver.add(f"model/{name}", parameter, Part.WEIGHTS)
    for name, (parameter, moment) in moments.items():  # plain tensors, shaped like the rank's piece
        whole, offset = box_of(parameter)
        saver.add(name, moment, Part.OPTIMIZER, whole=whole, offset=offset)
    saver.freeze()

A local tensor is the same object before and after; take it by `parameter.to_local()` under `torch.no_grad()`, as with
gradients on every call makes another view. Call `reshard()` on every FSDP2 module before sleep: gathered copies are not
in the ledger.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from tidemill.compat.fsdp_internals import is_sharded_now, parameters_of
from tidemill.errors import ResidencyError

__all__ = ["Piece", "ShardedParameters", "box_of"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Piece:
    """This rank's elements of a parameter, which begin at `offset` in a tensor of shape `whole`; there may be none.

    `local` lies at the start of `buffer`, flat and padded.
    """

    local: torch.Tensor
    buffer: torch.Tensor
    whole: tuple[int, ...]
    offset: tuple[int, ...]


class ShardedParameters:
    """Finds the memory of parameters of the modules that it was told of."""

    def __init__(self) -> None:
        self._known: list[Any] = []

    def follow(self, module: nn.Module) -> None:
        """A module that FSDP2 shards, or that contains such. Raises ResidencyError while it holds gathered copies."""
        found = parameters_of(module)
        if not all(is_sharded_now(parameter) for parameter in found):
            raise ResidencyError(
                "cannot keep a module whose parameters are gathered now; call `reshard()` on every FSDP2 module first"
            )
        self._known.extend(found)

    def piece(self, name: str, parameter: DTensor) -> Piece:
        """The memory of a followed parameter. Raises ResidencyError for any other DTensor."""
        for known in self._known:
            if known.sharded_param is parameter:
                break
        else:
            raise ResidencyError(
                f"cannot register {name!r}: nobody said where this DTensor's memory lies; call `follow` with the "
                "module that FSDP2 shards, or register the local tensor with `whole` and `offset`"
            )
        if not _lies_in_buffer(known):
            # Its memory was exchanged since (`to_empty`, say), and FSDP2 would notice only in the first forward pass.
            known.reset_sharded_param()
        whole, offset = box_of(parameter)
        return Piece(local=parameter._local_tensor, buffer=known._sharded_param_data, whole=whole, offset=offset)


def _lies_in_buffer(known: Any) -> bool:
    local, buffer = known.sharded_param._local_tensor, known._sharded_param_data
    return bool(local.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr())


def box_of(parameter: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of the whole, and where this rank's piece begins in it: past the end when the rank holds nothing.

    Raises ResidencyError unless it is split over at most one dimension of its mesh, along its own first, and equal
    along the others.
    """
    whole, first = tuple(parameter.shape), 0
    places = parameter.device_mesh.get_coordinate()
    splits = [index for index, placement in enumerate(parameter.placements) if not isinstance(placement, Replicate)]
    for index in splits:
        placement = parameter.placements[index]
        if not isinstance(placement, Shard) or placement.dim != 0 or len(splits) > 1 or places is None:
            raise ResidencyError(
                f"cannot tell which piece of a tensor a rank holds: it is placed as {parameter.placements}; only "
                "splitting along the first dimension, over one dimension of the mesh, is known"
            )
        rows = -(-whole[0] // parameter.device_mesh.size(index))
        first = min(places[index] * rows, whole[0])
    return whole, (first, *(0 for _ in whole[1:])) if whole else ()
