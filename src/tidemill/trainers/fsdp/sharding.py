"""A model cut over ranks by FSDP2: each decoder layer is gathered when it is needed, the rest with the whole pass."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tidemill.contracts.workers import Place
from tidemill.trainers.fsdp.model import Predictor, load_predictor
from tidemill.trainers.fsdp.ranks import Alone, Ranks, Together

__all__ = ["load_over_ranks", "reshard", "shard_predictor"]


def load_over_ranks(
    folder: Path, *, place: Place, replicas: int, deadline: float, compute_dtype: torch.dtype, recompute: bool
) -> tuple[Ranks, Predictor]:
    """The model in `folder`, and the ranks that share it; every rank must call it. Alone, it is whole.

    Raises DataError for the folder, and what `Together` raises.
    """
    load = partial(load_predictor, folder, device=torch.device(place.device), recompute=recompute)
    if place.ranks == 1:
        return Alone(), load()
    ranks = Together(place=place, replicas=replicas, deadline=deadline)
    try:
        predictor = load(shard=partial(shard_predictor, mesh=ranks.mesh, compute_dtype=compute_dtype))
        ranks.follow([predictor])
    except BaseException:
        ranks.close()
        raise
    return ranks, predictor


def shard_predictor(predictor: Predictor, *, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Cut every parameter, in place. Tied embeddings lie in the group of the whole, where they stay one parameter.

    Layers compute in `compute_dtype`; gradients are reduced in float32, as sums over ranks: nothing is averaged.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype, reduce_dtype=torch.float32
    )
    for layer in predictor.network.get_decoder().layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(predictor, mesh=mesh, mp_policy=policy)
    for module in _sharded(predictor):
        module.set_gradient_divide_factor(1.0)
        # Else the factor becomes an operation of NCCL's that gloo does not have.
        module.set_force_sum_reduction_for_comms(True)


def reshard(module: nn.Module) -> None:
    """Free what was gathered: after a forward pass without backward the root stays whole. Communicates nothing."""
    for part in _sharded(module):
        part.reshard()


def _sharded(module: nn.Module) -> list[Any]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]
