"""Whole tensors of a sharded model, one after the other: gathered a layer at a time, in one collective each."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tidemill.trainers.fsdp.gathering import all_gathered
from tidemill.trainers.fsdp.pieces import local
from tidemill.trainers.fsdp.ranks import SHARD

__all__ = ["whole_weights"]

_LAYERS = ".layers."


def whole_weights(parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Every parameter by name, in order; a collective, which all ranks must go through at the same pace.

    Plain parameters and those that one rank holds whole are handed out themselves, others as new tensors. No more than
    a layer is whole at once.
    """
    for _, group in groupby(parameters.items(), key=lambda item: _bucket(item[0])):
        yield from _gathered(list(group))


def _bucket(name: str) -> str:
    """The layer that a parameter belongs to; what is in none, word matrices above all, is gathered by itself."""
    before, found, after = name.partition(_LAYERS)
    return before + found + after.partition(".")[0]


def _gathered(group: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    first = group[0][1]
    if not isinstance(first, DTensor) or _shards(first) == 1:
        yield from ((name, local(parameter).detach()) for name, parameter in group)
        return
    shards = _shards(first)
    rows = [-(-parameter.shape[0] // shards) for _, parameter in group]
    sizes = [count * parameter.shape[1:].numel() for count, (_, parameter) in zip(rows, group, strict=True)]
    own = torch.zeros(sum(sizes), dtype=first.dtype, device=local(first).device)
    for part, (_, parameter) in zip(torch.split(own, sizes), group, strict=True):
        mine = local(parameter).detach()
        part[: mine.numel()].copy_(mine.flatten())
    found = all_gathered(own, count=shards, group=first.device_mesh.get_group(SHARD))
    for part, count, (name, parameter) in zip(torch.split(found, sizes, dim=1), rows, group, strict=True):
        whole = part.reshape(shards * count, *parameter.shape[1:])
        yield name, whole[: parameter.shape[0]]


def _shards(tensor: DTensor) -> int:
    return tensor.device_mesh.size((tensor.device_mesh.mesh_dim_names or ()).index(SHARD))
