"""One rank of the trainer: float32 masters, AdamW, and memory that can be given back between two steps.

Alone it needs no process group and cuts nothing. Several ranks hold a part of every parameter each, and of its moments;
with `replicas`, so many copies of the whole, each cut over equally many ranks.
"""

import contextlib
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor

from tidemill import faults
from tidemill.algorithms.deal import deal, put_back
from tidemill.algorithms.token_ids import check_token_ids
from tidemill.contracts.algorithm import Loss
from tidemill.contracts.batch import Batch, StepReport
from tidemill.contracts.checkpoint import Saved, Snapshot
from tidemill.contracts.events import Emit, Notice, phase
from tidemill.contracts.footprint import Part
from tidemill.contracts.landing import Landing
from tidemill.contracts.residency import Gate, Moved
from tidemill.contracts.workers import Place
from tidemill.errors import CheckpointError, ResidencyError, TrainerError
from tidemill.residency.gate import TenantGate
from tidemill.residency.residue import residue_of
from tidemill.trainers.common.schedule import PhaseSettings, learning_rate
from tidemill.trainers.fsdp.memory import RankMemory
from tidemill.trainers.fsdp.model import ComputeDtype, PolicyModel
from tidemill.trainers.fsdp.optimizer import AdamW
from tidemill.trainers.fsdp.passes import Passes
from tidemill.trainers.fsdp.progress import Progress
from tidemill.trainers.fsdp.sharding import load_over_ranks
from tidemill.trainers.fsdp.updates import Updates
from tidemill.trainers.fsdp.whole_weights import whole_weights

__all__ = ["FsdpTrainer"]


class FsdpTrainer:
    """Built awake with its gate closed. State: parameters, moments, and the counts in `Progress`.

    `model` is a local folder; `phases` are the settings by name of phase; `max_grad_norm` 0 never clips.
    Equal inputs give equal bits, slept in between or not: on the same machine with as many threads and ranks.
    """

    name = "trainer"

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
        spare_bytes: int | None = None,
        keep_addresses: bool = False,
        stop_on_leak: bool = True,
        deadline: float = 300.0,
        emit: Emit,
    ) -> None:
        self._place = place
        self._device = torch.device(place.device)
        residue_of(self._device)  # what the process holds there now is its context; what the model brings is not
        dtype: torch.dtype = getattr(torch, compute_dtype)
        self._ranks, self._predictor = load_over_ranks(
            model, place=place, replicas=replicas, deadline=deadline, compute_dtype=dtype, recompute=recompute
        )
        self._network, self._naming = self._predictor.network, self._predictor.naming
        self._parameters: dict[str, Tensor] = dict(self._network.named_parameters())
        self._optimizer = AdamW(self._parameters)
        self.minibatches = minibatches
        self._phases = dict(phases)
        self._emit = emit
        self._gate = TenantGate(self.name)
        self._progress = Progress()
        self._version, self._stepping, self._torn = 0, False, False
        self._memory = RankMemory(
            predictor=self._predictor,
            optimizer=self._optimizer,
            ranks=self._ranks,
            device=self._device,
            page_bytes=page_bytes,
            spare_bytes=spare_bytes,
            deadline=deadline,
            keep_addresses=keep_addresses,
            stop_on_leak=stop_on_leak,
            emit=emit,
        )
        autocast = dtype if place.ranks == 1 else torch.float32  # cut layers cast by themselves
        policy = PolicyModel(self._predictor, device=self._device, autocast=autocast)
        self.vocabulary = policy.words
        self._passes = Passes(model=policy, device=self._device, tokens_per_micro_batch=tokens_per_micro_batch)
        self._updates = Updates(
            passes=self._passes,
            parameters=self._parameters,
            optimizer=self._optimizer,
            ranks=self._ranks,
            max_grad_norm=max_grad_norm or math.inf,
            changing=self._changing,
        )

    @property
    def gate(self) -> Gate:
        """Opened and closed by Residency."""
        return self._gate

    def resident(self) -> Part:
        """See RankMemory."""
        return self._memory.resident()

    def footprint(self, part: Part) -> int:
        """See RankMemory; of this rank's pieces."""
        return self._memory.footprint(part)

    def host_bytes(self) -> int:
        """Bytes of this rank's host pages."""
        return self._memory.host_bytes()

    def wake_up(self, part: Part) -> Moved:
        """See RankMemory. Communicates nothing."""
        return self._memory.wake_up(part)

    def arrive(self, part: Part) -> Generator[int, None, Moved]:
        """See Swappable. Communicates nothing."""
        return self._memory.arrive(part)

    def sleep(self) -> Moved:
        """Drop gradients, copy the rest to the host unless it is there already, and give the device memory back.

        Communicates nothing.
        """
        self._refuse_in_step()
        return self._memory.sleep(self._version)

    def leave(self) -> Generator[int, None, Moved]:
        """See Swappable; refused as `sleep`. Communicates nothing."""
        self._refuse_in_step()
        return self._memory.leave(self._version)

    def _refuse_in_step(self) -> None:
        if self._stepping:
            raise ResidencyError("cannot put trainer to sleep: a step is under way; leave its lease first")

    def begin(self, phase: str) -> None:
        """Fresh moments and counts, unless `phase` is under way. Raises TrainerError for a phase without settings."""
        self._gate.check(Part.ALL, "begin")
        if phase not in self._phases:
            raise TrainerError(f"cannot begin {phase!r}: there are settings for {', '.join(sorted(self._phases))} only")
        if phase == self._progress.phase:
            return
        self._refuse_if_torn("begin a phase")
        self._memory.ready(Part.OPTIMIZER)
        self._memory.settle()
        self._version, self._progress = self._version + 1, Progress(phase=phase)
        self._optimizer.reset()

    def step(self, batch: Batch, loss: Loss) -> StepReport:
        """`update` of this rank's share, which it deals itself: every rank is given the whole batch."""
        self._gate.check(Part.ALL, "step")
        check_token_ids(batch, vocabulary=self.vocabulary)
        own = deal(batch, ranks=self._place.ranks, minibatches=self.minibatches)[self._place.rank]
        report = self.update([share.batch for share in own], loss)
        return replace(report, logprobs=put_back(own, [report.logprobs], tokens=batch.tokens))

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
            check_token_ids(batch, vocabulary=self.vocabulary)
        settings = self._phases[self._progress.phase]
        lr = learning_rate(settings, self._progress.updates)
        with phase(self._emit, "train", self.name), self._updating():
            report = self._updates.run(minibatches, loss, settings, lr=lr)
            self._progress = self._progress.advance(optimizer_steps=self._optimizer.steps)
        self._memory.changed(self._version)
        return report

    def _changing(self) -> None:
        self._memory.ready(Part.ALL)
        self._memory.settle()
        self._version += 1
        faults.point("trainer.update")

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
            self._memory.drop()

    def _refuse_if_torn(self, doing: str) -> None:
        if self._torn:
            raise TrainerError(
                f"cannot {doing}: a step failed between two of its updates, so the weights are of no step; load a "
                "checkpoint or start the run again"
            )

    def log_probs(self, batch: Batch) -> Float32[np.ndarray, " N"]:
        """Under the present weights, at the batch's temperature; of this rank's rows. A collective."""
        self._gate.check(Part.WEIGHTS, "log_probs")
        check_token_ids(batch, vocabulary=self.vocabulary)
        try:
            return self._passes.log_probs(self._updates.log_probs_plan(batch), batch)
        finally:
            self._memory.drop()

    def weight_specs(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Of the float32 masters."""
        return self._naming.specs({name: ("F32", tuple(held.shape)) for name, held in self._parameters.items()})

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The float32 masters, each under the lease or not at all: themselves on one rank, else gathered on every one.

        A collective then: all ranks ask for the next one at the same pace.
        """
        self._gate.check(Part.WEIGHTS, "named_weights")
        return self._live_weights()

    def _live_weights(self) -> Iterator[tuple[str, Tensor]]:
        weights = self._naming.split_all(whole_weights(self._parameters))
        for _ in self.weight_specs():
            self._gate.check(Part.WEIGHTS, "named_weights")
            self._memory.ready(Part.WEIGHTS)
            yield next(weights)

    def snapshot(self) -> Snapshot:
        """The present state. Asleep, or unchanged since, it is the host copy, and needs no lease.

        Else that copy is begun; whoever reads the snapshot waits for it, and so does the next change of the state.
        Of this rank's pieces; what several ranks hold the same is the first one's. Communicates nothing.
        """
        self._refuse_if_torn("save the trainer")
        if self._stepping:
            raise CheckpointError("cannot save the trainer: a step is under way; save between two steps")
        if not self._memory.holds(self._version):
            self._gate.check(Part.ALL, "snapshot")
        spread = {"ranks": self._ranks.count, "replicas": self._ranks.count // self._ranks.shards}
        return self._memory.snapshot(
            self._version, self._progress.to_json() | {"total_steps": self._progress.total_steps(self._phases)} | spread
        )

    def landing(self) -> Landing:
        """See Landable."""
        self._gate.check(Part.ALL, "landing")
        return self._memory.landing()

    def load(self, saved: Saved) -> None:
        """Parameters, moments and counts; each rank its own pieces of what any number of ranks saved, without a word.

        Raises CheckpointError, and changes nothing, unless all are there; where accepted, moments begin at zero.
        """
        self._gate.check(Part.ALL, "load")
        progress = Progress.from_json(saved.extra)
        progress.check_phase(self._phases)
        if self._memory.load(saved, self._version + 1):
            progress = progress.with_fresh_moments()
        self._progress, self._optimizer.steps = progress, progress.optimizer_steps
        self._version, self._torn = self._version + 1, False
        if text := progress.new_curve(self._progress.total_steps(self._phases), saved.extra.get("total_steps")):
            self._emit(Notice(text=text))

    def park(self) -> None:
        """See RankTrainer; alone there is nothing to park."""
        self._ranks.park()

    def revive(self) -> None:
        """See RankTrainer."""
        self._ranks.revive()

    def close(self) -> None:
        """Unpin the host pages and end the process groups."""
        self._memory.close()
        self._ranks.close()
