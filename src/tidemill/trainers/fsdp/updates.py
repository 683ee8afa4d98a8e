"""One update by all ranks: minibatch after minibatch, each with passes over its micro-batches and an optimizer step.

Ranks make the same passes, with nothing in them where a rank has no rows left, since every pass gathers the model.
Whatever decides anything (how many passes, whether there is a step, how far it is clipped) is of all ranks together.

Rule for old log-probs: with one minibatch a step, the pass that trains is also the one that measures, so the ratio is
1. With more, they are computed for all rows before the first update. The engine's log-probs never enter a ratio; the
report holds the old ones, so that the two can be compared.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from tidemill.contracts.algorithm import Loss
from tidemill.contracts.batch import Batch, StepReport
from tidemill.trainers.common import gradients
from tidemill.trainers.common.padding import PaddedRows
from tidemill.trainers.common.schedule import PhaseSettings
from tidemill.trainers.fsdp.before import BeforeUpdate
from tidemill.trainers.fsdp.optimizer import AdamW
from tidemill.trainers.fsdp.passes import Passes
from tidemill.trainers.fsdp.pieces import local
from tidemill.trainers.fsdp.ranks import Ranks
from tidemill.trainers.fsdp.tally import Tally

__all__ = ["Updates"]


class Updates:
    """Changes `parameters` by way of `optimizer`; tells `changing` before each change."""

    def __init__(
        self,
        *,
        passes: Passes,
        parameters: Mapping[str, Tensor],
        optimizer: AdamW,
        ranks: Ranks,
        max_grad_norm: float,
        changing: Callable[[], None],
    ) -> None:
        self._passes = passes
        self._parameters = list(parameters.values())
        self._optimizer = optimizer
        self._ranks = ranks
        self._max_grad_norm = max_grad_norm
        self._changing = changing
        self._device = passes.device

    def run(self, minibatches: Sequence[Batch], loss: Loss, settings: PhaseSettings, *, lr: float) -> StepReport:
        """All of one update, of this rank's rows; a collective. The report is of all ranks, the same on each."""
        plan = self._plan(minibatches)
        old = self._old_logprobs(plan, minibatches)
        tally, before_update = Tally(), BeforeUpdate()
        norms: list[float] = []
        for parts, known, batch in zip(plan, old, minibatches, strict=True):
            count, before = self._passes.accumulate(parts, known, loss, tally, temperature=batch.temperature)
            before_update.add(parts, before, tokens=batch.tokens)
            norms.extend(self._apply(count, settings, lr) if parts else [])
        metrics = tally.metrics(self._ranks.gather)
        return _report(metrics, before_update.taken(), norms, empty=len(plan) - len(norms), lr=lr)

    def _plan(self, minibatches: Sequence[Batch]) -> list[list[PaddedRows]]:
        """Micro-batches of each minibatch, as many as any rank has."""
        plan = [self._passes.plan(batch) for batch in minibatches]
        most = self._gather([len(parts) for parts in plan]).amax(0).tolist()
        return [self._passes.padded(parts, int(count)) for parts, count in zip(plan, most, strict=True)]

    def log_probs_plan(self, batch: Batch) -> list[PaddedRows]:
        """Micro-batches of all rows, as many as any rank has; a collective."""
        parts = self._passes.plan_all(batch)
        return self._passes.padded(parts, int(self._gather([len(parts)]).amax().item()))

    def _gather(self, values: Sequence[float]) -> Tensor:
        return self._ranks.gather(torch.tensor(values, dtype=torch.float64, device=self._device))

    def _old_logprobs(self, plan: list[list[PaddedRows]], minibatches: Sequence[Batch]) -> list[list[Tensor]]:
        if len(plan) == 1:
            return [[]]
        return [
            [self._passes.old_logprobs(rows, temperature=batch.temperature) for rows in parts]
            for parts, batch in zip(plan, minibatches, strict=True)
        ]

    def _apply(self, count: float, settings: PhaseSettings, lr: float) -> list[float]:
        """Make one optimizer step of the gradients at hand, if they are finite. Their norm; nothing without a token."""
        taken = [local(gradient) for gradient in gradients.taken(self._parameters)]
        total, norm = self._over_ranks(count, gradients.norm_of(taken))
        if total == 0:
            gradients.drop(self._parameters)
            return []
        mean = gradients.finish(taken, norm=norm, count=total, max_norm=self._max_grad_norm)
        if math.isfinite(mean):
            self._changing()
            self._optimizer.apply(taken, settings, lr=lr)
        gradients.drop(self._parameters)
        return [mean]

    def _over_ranks(self, count: float, norm: Tensor) -> tuple[float, float]:
        """The count of all ranks, and the norm of the whole gradient, of which each copy of the model has one."""
        rows = self._ranks.gather(torch.stack([norm.new_tensor(count), norm])).tolist()
        # On one rank this is its own norm to the bit: the root of a float's square is that float.
        squares = [norm * norm for _, norm in rows[: self._ranks.shards]]
        return sum(count for count, _ in rows), math.sqrt(sum(squares))


def _report(
    metrics: Mapping[str, float],
    logprobs: Float32[np.ndarray, " N"],
    norms: Sequence[float],
    *,
    empty: int,
    lr: float,
) -> StepReport:
    finite = [norm for norm in norms if math.isfinite(norm)]
    found = {
        "train/tokens": 0.0,
        "train/padding_fraction": 0.0,
        **{name: value for name, value in metrics.items() if math.isfinite(value)},
        "policy/lr": lr,
        "policy/updates_skipped": float(len(norms) - len(finite)),
        "policy/updates_empty": float(empty),
    }
    if finite:
        return StepReport(metrics=found | {"policy/grad_norm": sum(finite) / len(finite)}, logprobs=logprobs)
    reason = "the gradient was not finite" if norms else "no token was left to train on"
    return StepReport(metrics=found, logprobs=logprobs, skipped=reason)
