"""Where FSDP2 keeps its parameters and process groups: read from private attributes, here and nowhere else.

Why: fully_shard has no public way to exchange the process groups or the memory of a module that is sharded already.
Versions: torch 2.11 to 2.13, whose names differ. May go when torch can move both by itself. Check: `parameters_of`
raises when a sharded module does not hold what is looked for.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from tidemill.errors import ResidencyError

__all__ = ["is_sharded_now", "owners_of_groups", "parameters_of"]


def _param_groups(module: nn.Module) -> Iterator[Any]:
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # One attribute in 2.11, a list of them from 2.13 on.
            for value in vars(part._get_fsdp_state()).values():
                found = value if isinstance(value, list) else [value]
                yield from (group for group in found if isinstance(group, FSDPParamGroup))


def parameters_of(module: nn.Module) -> list[FSDPParam]:
    """FSDP2's own object for each parameter that it shards in `module`; tied parameters once."""
    found = [parameter for group in _param_groups(module) for parameter in group.fsdp_params]
    for parameter in found:
        if not {"_sharded_param_data", "sharded_param", "sharded_state"} <= set(vars(parameter)):
            raise ResidencyError(
                "cannot find the memory of FSDP2's parameters: this version of torch keeps it elsewhere; torch 2.11 to "
                "2.13 are known"
            )
    return found


def is_sharded_now(parameter: FSDPParam) -> bool:
    """Whether the module holds the shard now, and not a gathered copy."""
    return bool(parameter.sharded_state == ShardedState.SHARDED)


def owners_of_groups(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """All objects of FSDP2 in `modules` among whose attributes are process groups, or meshes; some of them twice."""
    for module in modules:
        for group in _param_groups(module):
            yield group
            for holder in (group, *group.fsdp_params):
                for name in ("mesh_info", "post_forward_mesh_info"):
                    # A rank alone, or a mesh of which it is no part, has no second one.
                    if vars(holder).get(name) is not None:
                        yield vars(holder)[name]
