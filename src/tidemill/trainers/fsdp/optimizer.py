"""AdamW whose state is there from the start, so that the ledger of what must survive sleep is complete.

Arithmetic is torch's own fused kernel. All parameters, biases and norms too, are decayed, as `torch.optim.AdamW` does
by default.

Source: Loshchilov & Hutter 2017, arXiv:1711.05101, algorithm 2.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from tidemill.trainers.common.schedule import PhaseSettings
from tidemill.trainers.fsdp.pieces import local

__all__ = ["AdamW"]


class AdamW:
    """Moments of named parameters. `steps` counts the updates applied, of which bias correction depends.

    Of a parameter that is cut over ranks, moments and updates are of this rank's elements, as plain tensors.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = dict(parameters)
        self.exp_avg = {name: torch.zeros_like(local(tensor).detach()) for name, tensor in parameters.items()}
        self.exp_avg_sq = {name: torch.zeros_like(local(tensor).detach()) for name, tensor in parameters.items()}
        self.steps = 0

    def state(self) -> dict[str, Tensor]:
        """Every moment, by the name that it has in a checkpoint."""
        return {f"optimizer/exp_avg/{name}": tensor for name, tensor in self.exp_avg.items()} | {
            f"optimizer/exp_avg_sq/{name}": tensor for name, tensor in self.exp_avg_sq.items()
        }

    def reset(self) -> None:
        """As if no update had been made."""
        torch._foreach_zero_([*self.exp_avg.values(), *self.exp_avg_sq.values()])
        self.steps = 0

    @torch.no_grad()
    def apply(self, gradients: Sequence[Tensor], settings: PhaseSettings, *, lr: float) -> None:
        """One update; `gradients` are plain tensors, in the order of the parameters."""
        # A rank may have no elements of some parameters.
        held = {name: each for name, each in zip(self.parameters, gradients, strict=True) if each.numel()}
        if held:
            self._apply(held, settings, lr)
        self.steps += 1

    def _apply(self, gradients: Mapping[str, Tensor], settings: PhaseSettings, lr: float) -> None:
        # The kernel wants a counter a parameter, on the device. They are made here and not kept: what sleeps must not
        # leave anything behind.
        counters = torch.full((len(gradients),), float(self.steps), device=next(iter(gradients.values())).device)
        adamw(
            [local(self.parameters[name]) for name in gradients],
            list(gradients.values()),
            [self.exp_avg[name] for name in gradients],
            [self.exp_avg_sq[name] for name in gradients],
            [],
            list(counters.unbind()),
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=settings.betas[0],
            beta2=settings.betas[1],
            lr=lr,
            weight_decay=settings.weight_decay,
            eps=settings.eps,
        )
