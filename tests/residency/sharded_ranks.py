"""A rank of a small sharded model, for tests over ranks: what a trainer does, with plain torch."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tidemill.contracts.events import Emit
from tidemill.contracts.footprint import Part
from tidemill.contracts.workers import Place
from tidemill.residency.groups import ProcessGroups
from tidemill.residency.savers.host_arena import HostArenaSaver
from tidemill.residency.sharded import box_of

__all__ = ["Job", "Net", "Rank"]


class Net(nn.Module):
    """Sizes that no number of ranks divides, a tied head, and parameters with fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(33, 10)
        self.layers = nn.ModuleList([nn.Linear(10, 10) for _ in range(2)])
        self.head = nn.Linear(10, 33, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.mix = nn.Parameter(torch.randn(3, 10))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden * self.scale + self.mix.sum(0))


class Job:
    """A sharded model, its optimizer with all state there, and its inputs."""

    def __init__(
        self, rank: int, mesh: Any, *, half: bool = False, reshard: bool | int = True, optimize: bool = True
    ) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.model: Any = Net()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if half else MixedPrecisionPolicy()
        for part in (*self.model.layers, self.model):
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        if not optimize:
            return
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, seed: int) -> float:
        ids = torch.randint(0, 33, (4, 6), generator=torch.Generator().manual_seed(100 * seed + self.rank))
        loss = nn.functional.cross_entropy(self.model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())

    def reshard(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def local(self) -> dict[str, torch.Tensor]:
        """Copies of all that training depends on, this rank's part."""
        found = {name: parameter._local_tensor for name, parameter in self.model.named_parameters()}
        for index, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{index}/{key}": _local(value) for key, value in state.items()}
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    def saver(self, page_bytes: int = 1024) -> HostArenaSaver:
        keeper = HostArenaSaver(device="cpu", page_bytes=page_bytes, pin=False)
        keeper.follow(self.model)
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            keeper.add(f"model/{name}", parameter, Part.WEIGHTS)
        for name, parameter in self.model.named_parameters():
            whole, offset = box_of(parameter)
            for key in ("exp_avg", "exp_avg_sq"):
                moment = _local(self.optimizer.state[parameter][key])
                keeper.add(f"{key}/{name}", moment, Part.OPTIMIZER, whole=whole, offset=offset)
        keeper.freeze()
        return keeper


def _local(value: Any) -> torch.Tensor:
    return value._local_tensor if isinstance(value, DTensor) else value


class Rank:
    """One rank: its groups, and whatever a test lets it do."""

    deadline = 20.0

    def __init__(self, place: Place, emit: Emit) -> None:
        self.place = place
        self.groups = ProcessGroups(place=place, deadline=self.deadline)
        self.kept: dict[str, Any] = {}

    def run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of a test's module with this rank first."""
        return work(self, *arguments)

    def leave(self) -> None:
        """Die as a crash would."""
        os._exit(3)
