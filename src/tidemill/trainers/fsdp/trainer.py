"""The trainer of one process: float32 masters, AdamW, and memory that can be given back between two steps.

It needs no process group and shards nothing: a world of one rank. Sharding comes with several ranks.

Rule for old log-probs: with one minibatch a step, the pass that trains is also the one that measures, so the ratio is
1. With more, they are computed for all rows before the first update. The engine's log-probs never enter a ratio; how
far they are off is reported under `mismatch/`.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from tidemill import faults
from tidemill.algorithms.deal import deal
from tidemill.contracts.algorithm import Loss
from tidemill.contracts.batch import Batch, StepReport
from tidemill.contracts.checkpoint import Saved, Snapshot
from tidemill.contracts.events import Emit, Notice, phase
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Gate
from tidemill.contracts.workers import Place
from tidemill.errors import CheckpointError, ResidencyError, TrainerError
from tidemill.residency.gate import TenantGate
from tidemill.residency.savers.host_arena import HostArenaSaver
from tidemill.trainers.common import gradients
from tidemill.trainers.common.padding import PaddedRows
from tidemill.trainers.common.schedule import PhaseSettings, learning_rate
from tidemill.trainers.fsdp.model import ComputeDtype, PolicyModel, load_network
from tidemill.trainers.fsdp.optimizer import AdamW
from tidemill.trainers.fsdp.passes import Passes
from tidemill.trainers.fsdp.progress import Progress
from tidemill.trainers.fsdp.tally import Tally

__all__ = ["FsdpTrainer"]


class FsdpTrainer:
    """Built awake with its gate closed. State: parameters, moments, and the counts in `Progress`.

    `model` is a local folder; `phases` are the settings by name of phase; `max_grad_norm` 0 never clips.
    Equal inputs on the same machine with the same number of threads give equal bits, slept in between or not.
    """

    def __init__(
        self,
        *,
        model: Path,
        place: Place,
        replicas: int = 1,
        compute_dtype: ComputeDtype,
        tokens_per_micro_batch: int,
        minibatches: int,
        recompute: bool,
        max_grad_norm: float,
        phases: Mapping[str, PhaseSettings],
        page_bytes: int,
        deadline: float = 300.0,
        emit: Emit,
    ) -> None:
        self._place = place
        self._device = torch.device(place.device)
        network = load_network(model, device=self._device, recompute=recompute)
        self._parameters = dict(network.named_parameters())
        self._grad_bytes = sum(tensor.numel() * tensor.element_size() for tensor in self._parameters.values())
        self._optimizer = AdamW(self._parameters)
        self._minibatches = minibatches
        self._max_grad_norm = max_grad_norm or math.inf
        self._phases = dict(phases)
        self._emit = emit
        self._gate = TenantGate(self.name)
        self._progress = Progress()
        self._version = 0
        self._stepping = False
        self._torn = False
        self._grads_awake = True
        self._saver = HostArenaSaver(device=self._device, page_bytes=page_bytes, pin=self._device.type == "cuda")
        self._network = network
        for name, (tensor, part) in self._state().items():
            self._saver.add(name, tensor, part)
        self._saver.freeze()
        policy = PolicyModel(network, device=self._device, compute_dtype=compute_dtype)
        self._words = policy.words
        self._passes = Passes(model=policy, device=self._device, tokens_per_micro_batch=tokens_per_micro_batch)

    def _state(self) -> dict[str, tuple[Tensor, Part]]:
        """All that must survive sleep, as it is now, by its name in a checkpoint."""
        found: dict[str, tuple[Tensor, Part]] = {}
        found |= {f"model/{name}": (tensor, Part.WEIGHTS) for name, tensor in self._network.named_parameters()}
        found |= {f"buffer/{name}": (tensor, Part.WEIGHTS) for name, tensor in self._network.named_buffers()}
        return found | {name: (tensor, Part.OPTIMIZER) for name, tensor in self._optimizer.state().items()}

    @property
    def name(self) -> str:
        """`trainer`."""
        return "trainer"

    @property
    def gate(self) -> Gate:
        """Opened and closed by Residency."""
        return self._gate

    def resident(self) -> Part:
        """Gradients count as resident whenever there is leave to have them, also between two steps."""
        return self._saver.resident_part() | (Part.GRADS if self._grads_awake else Part.NONE)

    def footprint(self, part: Part) -> int:
        """Gradients are as large as the parameters. Activations are not counted."""
        return self._saver.device_bytes(part) + (self._grad_bytes if Part.GRADS in part else 0)

    def host_bytes(self) -> int:
        """Bytes of the host pages."""
        return self._saver.host_bytes()

    def wake_up(self, part: Part) -> None:
        """Raises ResidencyError, and is as before, when memory runs out."""
        self._saver.restore(part)
        self._grads_awake = self._grads_awake or Part.GRADS in part

    def sleep(self) -> None:
        """Drop gradients, copy the rest to the host unless it is there already, and give the device memory back."""
        if self._stepping:
            raise ResidencyError("cannot put trainer to sleep: a step is under way; leave its lease first")
        self._saver.ledger.check_covers(self._state())
        gradients.drop(list(self._parameters.values()))
        self._saver.capture(self._version)
        self._saver.release(self._version)
        self._grads_awake = False

    def begin(self, phase: str) -> None:
        """Fresh moments and counts, unless `phase` is under way. Raises TrainerError for a phase without settings."""
        self._gate.check(Part.ALL, "begin")
        if phase not in self._phases:
            raise TrainerError(f"cannot begin {phase!r}: there are settings for {', '.join(sorted(self._phases))} only")
        if phase == self._progress.phase:
            return
        self._refuse_if_torn("begin a phase")
        self._version += 1
        self._optimizer.reset()
        self._progress = Progress(phase=phase)

    @property
    def minibatches(self) -> int:
        """Optimizer steps in one update."""
        return self._minibatches

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self._words

    def step(self, batch: Batch, loss: Loss) -> StepReport:
        """`update` of this rank's share, which it deals itself: every rank is given the whole batch."""
        self._gate.check(Part.ALL, "step")
        self._check_ids(batch)
        dealt = deal(batch, ranks=self._place.ranks, minibatches=self._minibatches)
        return self.update(dealt[self._place.rank], loss)

    def update(self, minibatches: Sequence[Batch], loss: Loss) -> StepReport:
        """One optimizer step a minibatch, all at the learning rate of this update.

        A minibatch without a token to train on, or whose gradient is not finite, changes neither weights nor moments
        and is counted. Raises TrainerError, before anything changes, for a batch that cannot be used.
        """
        self._gate.check(Part.ALL, "update")
        self._refuse_if_torn("step")
        if not self._progress.phase:
            raise TrainerError(
                'cannot step: no phase has begun, so there is no learning rate; call `begin("rl")` first'
            )
        for batch in minibatches:
            self._check_ids(batch)
        with phase(self._emit, "train", self.name), self._updating():
            return self._update(minibatches, loss)

    def _update(self, minibatches: Sequence[Batch], loss: Loss) -> StepReport:
        lr = learning_rate(self._phases[self._progress.phase], self._progress.updates)
        plan = [self._passes.plan(batch) for batch in minibatches]
        old = self._old_logprobs(plan, minibatches)
        tally = Tally()
        norms: list[float] = []
        for parts, before, batch in zip(plan, old, minibatches, strict=True):
            count = self._passes.accumulate(parts, before, batch, loss, tally)
            if count > 0:
                norms.append(self._apply(count, lr))
        self._progress = self._progress.advance(optimizer_steps=self._optimizer.steps)
        return _report(plan, norms, tally, lr)

    def _old_logprobs(self, plan: list[list[PaddedRows]], minibatches: Sequence[Batch]) -> list[list[Tensor]]:
        if len(plan) == 1:
            return [[]]
        return [
            [self._passes.old_logprobs(rows, temperature=batch.temperature) for rows in parts]
            for parts, batch in zip(plan, minibatches, strict=True)
        ]

    def _apply(self, count: float, lr: float) -> float:
        """Make one optimizer step of the gradients at hand, if they are finite; returns their norm."""
        parameters = list(self._parameters.values())
        taken = gradients.taken(parameters)
        norm = gradients.finish(taken, count=count, max_norm=self._max_grad_norm)
        if math.isfinite(norm):
            self._version += 1
            faults.point("trainer.update")
            self._optimizer.apply(taken, self._phases[self._progress.phase], lr=lr)
        gradients.drop(parameters)
        return norm

    @contextlib.contextmanager
    def _updating(self) -> Iterator[None]:
        """Sleep is refused within. An exception after some minibatches leaves weights that belong to no step."""
        version, self._stepping = self._version, True
        try:
            yield
        except BaseException:
            self._torn = self._version != version
            raise
        finally:
            self._stepping = False
            gradients.drop(list(self._parameters.values()))

    def _refuse_if_torn(self, doing: str) -> None:
        if self._torn:
            raise TrainerError(
                f"cannot {doing}: a step failed between two of its updates, so the weights are of no step; load a "
                "checkpoint or start the run again"
            )

    def _check_ids(self, batch: Batch) -> None:
        if batch.tokens and not 0 <= batch.token_ids.min() <= batch.token_ids.max() < self._words:
            raise TrainerError(
                f"cannot use a batch with token ids from {batch.token_ids.min()} to {batch.token_ids.max()}: the model "
                f"has {self._words} words, so they come from another tokenizer; check `model` and the data"
            )

    def log_probs(self, batch: Batch) -> Float32[np.ndarray, " N"]:
        """Under the present weights, at the batch's temperature."""
        self._gate.check(Part.WEIGHTS, "log_probs")
        self._check_ids(batch)
        return self._passes.log_probs(batch)

    def weight_specs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Of the float32 masters."""
        return {name: ("F32", tuple(parameter.shape)) for name, parameter in self._parameters.items()}

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The float32 masters themselves, not copies; each is handed out under the lease, or not at all."""
        self._gate.check(Part.WEIGHTS, "named_weights")
        return self._live_weights()

    def _live_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters.items():
            self._gate.check(Part.WEIGHTS, "named_weights")
            yield name, parameter.detach()

    def snapshot(self) -> Snapshot:
        """The host copy, made now if the weights changed since the last one. Asleep it needs no lease."""
        self._refuse_if_torn("save the trainer")
        if self._stepping:
            raise CheckpointError("cannot save the trainer: a step is under way; save between two steps")
        if self._saver.sealed_key != self._version:
            self._gate.check(Part.ALL, "snapshot")
            self._saver.capture(self._version)
        kept = self._saver.snapshot()
        extra = self._progress.to_json() | {"total_steps": self._total_steps()}
        return Snapshot(tensors=kept.tensors, extra=extra, release=kept.release)

    def load(self, saved: Saved) -> None:
        """Parameters, moments and counts. Raises CheckpointError, and changes nothing, unless all of them are there."""
        self._gate.check(Part.ALL, "load")
        progress = Progress.from_json(saved.extra)
        if progress.phase and progress.phase not in self._phases:
            raise CheckpointError(
                f"cannot load the trainer: it was saved in phase {progress.phase!r}, and there are settings for "
                f"{', '.join(sorted(self._phases))} only; keep that phase in the settings"
            )
        missing = sorted(set(self._optimizer.state()) - set(saved.tensors))
        if missing:
            raise CheckpointError(
                f"cannot load the trainer: {len(missing)} tensors of the optimizer are not in the checkpoint "
                f"({missing[0]}, ...), and without them training would start afresh in silence; use a whole "
                "checkpoint, or start a new run from its exported model"
            )
        self._saver.load(saved.tensors)
        self._progress, self._optimizer.steps = progress, progress.optimizer_steps
        self._version += 1
        self._torn = False
        self._tell_changed_total(saved.extra.get("total_steps"))

    def park(self) -> None:
        """Nothing: one process has no groups."""

    def revive(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Unpin the host pages."""
        self._saver.close()

    def _total_steps(self) -> int:
        return self._phases[self._progress.phase].total_steps if self._progress.phase else 0

    def _tell_changed_total(self, before: object) -> None:
        if self._progress.phase and before != self._total_steps():
            self._emit(
                Notice(
                    text=f"the learning rate now falls until step {self._total_steps()} of phase "
                    f"{self._progress.phase}, no longer until {before}: the new curve holds from step "
                    f"{self._progress.updates} on"
                )
            )


def _report(plan: list[list[PaddedRows]], norms: list[float], tally: Tally, lr: float) -> StepReport:
    finite = [norm for norm in norms if math.isfinite(norm)]
    fed = sum(rows.mask.numel() for parts in plan for rows in parts)
    real = sum(len(rows.real) for parts in plan for rows in parts)
    metrics = {
        **{name: value for name, value in tally.metrics().items() if math.isfinite(value)},
        "policy/lr": lr,
        "policy/updates_skipped": float(len(norms) - len(finite)),
        "policy/updates_empty": float(len(plan) - len(norms)),
        "train/tokens": float(real),
        "train/padding_fraction": 1.0 - real / fed if fed else 0.0,
    }
    if finite:
        return StepReport(metrics=metrics | {"policy/grad_norm": sum(finite) / len(finite)})
    reason = "the gradient was not finite" if norms else "no token was left to train on"
    return StepReport(metrics=metrics, skipped=reason)
