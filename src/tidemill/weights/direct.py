"""Trainer and engine in one process, on one kind of device: weights are copied straight into live engine storage."""

from collections.abc import Iterator

import torch

from tidemill import faults
from tidemill.contracts.events import Emit
from tidemill.contracts.residency import Residency
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.weights import Sample, Samples, WeightReceiver, WeightSource
from tidemill.errors import WeightSyncError
from tidemill.weights.checksum import Checksums
from tidemill.weights.comparing import compare_checksums, compare_specs
from tidemill.weights.elements import stored_name, torch_dtype
from tidemill.weights.handing import handing_over
from tidemill.weights.samples import every_weight
from tidemill.weights.verifying import Verifier

__all__ = ["DirectWeightSync"]


class DirectWeightSync:
    """Hands weights over under the engine's lease for weights; the caller holds the trainer's.

    The checksum of each weight of `samples`, as cast to the engine's dtype, is compared with what the engine then
    holds. `words` says that trainer or engine may lie on an accelerator.
    """

    def __init__(
        self, *, residency: Residency, emit: Emit, samples: Samples = every_weight, words: bool = False
    ) -> None:
        self._residency = residency
        self._emit = emit
        self._verifier = Verifier(samples=samples, words=words, emit=emit)

    def update_weights(self, trainer: WeightSource, engine: WeightReceiver, version: PolicyVersion) -> None:
        """Close generation, copy, compare, publish `version`, in this order and all or nothing.

        Raises WeightSyncError on any failure; from `begin_update` on the engine's version is then unknown, and it
        refuses to generate until a later sync succeeds.
        """
        with handing_over(engine, version, residency=self._residency, emit=self._emit):
            self._hand_over(trainer, engine, version)

    def _hand_over(self, trainer: WeightSource, engine: WeightReceiver, version: PolicyVersion) -> None:
        sample = self._verifier.begin(version)
        engine.begin_update()
        sending = _Sending(trainer, torch_dtype(engine.dtype), sample)
        engine.load_weights(sending.weights())
        sending.check()
        sent = sending.sums.take()
        with self._verifier.timed(engine.name, before=sending.sums.seconds):
            compare_checksums(sent, engine.weight_checksums(sample), engine.name)
        faults.point("weights.publish")
        engine.publish(version)
        self._verifier.passed(engine.name, compared=len(sent), total=len(sending.came))


class _Sending:
    """The trainer's weights on their way, as they are, with the checksums that they should have in the engine."""

    def __init__(self, trainer: WeightSource, dtype: torch.dtype, sample: Sample) -> None:
        self._trainer = trainer
        self._told = trainer.weight_specs()
        self._dtype = dtype
        self._chosen = sample.chosen(self._told)
        self.sums = Checksums(words=sample.words)
        self.came: dict[str, tuple[str, tuple[int, ...]]] = {}

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._trainer.named_weights():
            faults.point("weights.send.tensor")
            if name in self.came:
                raise WeightSyncError(f"the trainer hands out two weights named {name!r}")
            self.came[name] = (stored_name(tensor.dtype), tuple(tensor.shape))
            if name in self._chosen:
                self.sums.add(name, tensor, self._dtype)
            yield name, tensor.detach()

    def check(self) -> None:
        """Raises WeightSyncError unless what came is what the trainer says that it has."""
        compare_specs(self._told, self.came)
