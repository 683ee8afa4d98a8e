"""States of many kinds through many sleeps, each beside a twin that never slept (`savers.host_arena`)."""

from collections.abc import Callable, Iterable

import pytest
import torch
from tests.residency.savers.kinds import KINDS, Kind, of_kind
from torch import nn

from tidemill.contracts.footprint import Part


class MuonLike(torch.optim.Optimizer):
    """Momentum, made orthogonal by Newton-Schulz; a matrix a state, and none for vectors."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                update = p.grad
                if p.ndim == 2:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                    update = momentum / (momentum.norm() + 1e-7)
                    for _ in range(3):
                        update = 1.5 * update - 0.5 * update @ update.T @ update
                p.sub_(update, alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "muon-like": lambda parameters: MuonLike(parameters, lr=0.05),
}


class Flat(nn.Module):
    """Two layers whose weights are views of one buffer of many pages, and a third, turned, whose are not."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.flat = torch.randn(2 * 24 * 24, device=device) * 0.2
        self.first, self.second = (nn.Parameter(self.flat[i * 576 : (i + 1) * 576].view(24, 24)) for i in range(2))
        self.turned = nn.Parameter((torch.randn(24, 24) * 0.2).to(device).t())
        self.bias = nn.Parameter(torch.zeros(24, device=device))
        self.nothing = nn.Parameter(torch.zeros(0, 24, device=device))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(inputs @ self.first) @ self.second) @ self.turned + self.bias


class Job:
    def __init__(self, name: str, kind: Kind) -> None:
        torch.manual_seed(0)
        self.kind, self.model = kind, Flat(kind.device)
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.saver = of_kind(kind, page_bytes=512)

    def keep(self) -> None:
        self.saver.add("flat", self.model.flat, Part.WEIGHTS)
        for name, parameter in self.model.named_parameters():
            self.saver.add(name, parameter, Part.WEIGHTS)
            for key, value in self.optimizer.state[parameter].items():
                # Fused kernels keep their counters on the device, others on the CPU.
                if isinstance(value, torch.Tensor) and value.device.type == self.kind.device:
                    self.saver.add(f"{name}/{key}", value, Part.OPTIMIZER)
        self.saver.freeze()

    def step(self, seed: int) -> float:
        inputs = torch.randn(8, 24, generator=torch.Generator().manual_seed(seed)).to(self.kind.device)
        loss = (self.model(inputs) - 1.0).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_through_sleeps_has_the_bits_of_a_twin(name: str, kind: Kind) -> None:
    job, twin = Job(name, kind), Job(name, kind)
    job.keep()
    for seed in range(6):
        assert job.step(seed) == twin.step(seed)
        if seed % 2:
            job.saver.capture(seed)
            job.saver.release(seed)
            job.saver.restore()
        else:
            for _ in job.saver.leave(seed):
                pass
            for _ in job.saver.arrive():
                pass
    assert torch.equal(job.model.flat, twin.model.flat) and torch.equal(job.model.turned, twin.model.turned)
    with torch.no_grad():
        job.model.flat[:576].zero_()
    assert not job.model.first.any()
