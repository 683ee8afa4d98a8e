"""Trainer and engine in one process, on one kind of device: weights are copied straight into live engine storage."""

from collections.abc import Iterator

import torch

from tidemill import faults
from tidemill.contracts.events import Emit
from tidemill.contracts.residency import Residency
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.weights import WeightReceiver, WeightSource
from tidemill.errors import WeightSyncError
from tidemill.weights.checksum import Checksums
from tidemill.weights.comparing import compare_checksums
from tidemill.weights.elements import torch_dtype
from tidemill.weights.handing import handing_over

__all__ = ["DirectWeightSync"]


class DirectWeightSync:
    """Hands weights over under the engine's lease for weights; the caller holds the trainer's.

    Each weight's checksum, taken after the cast to the engine's dtype, is compared with what the engine then holds.
    """

    def __init__(self, *, residency: Residency, emit: Emit) -> None:
        self._residency = residency
        self._emit = emit

    def update_weights(self, trainer: WeightSource, engine: WeightReceiver, version: PolicyVersion) -> None:
        """Close generation, copy, compare, publish `version`, in this order and all or nothing.

        Raises WeightSyncError on any failure; from `begin_update` on the engine's version is then unknown, and it
        refuses to generate until a later sync succeeds.
        """
        with handing_over(engine, version, residency=self._residency, emit=self._emit):
            self._hand_over(trainer, engine, version)

    def _hand_over(self, trainer: WeightSource, engine: WeightReceiver, version: PolicyVersion) -> None:
        engine.begin_update()
        sent = Checksums()
        engine.load_weights(_sending(trainer, torch_dtype(engine.dtype), sent))
        compare_checksums(sent.take(), engine.weight_checksums(), engine.name)
        faults.point("weights.publish")
        engine.publish(version)


def _sending(trainer: WeightSource, dtype: torch.dtype, sent: Checksums) -> Iterator[tuple[str, torch.Tensor]]:
    """The trainer's weights as they are; the checksum that each should have in the engine is noted in `sent`."""
    names: set[str] = set()
    for name, tensor in trainer.named_weights():
        faults.point("weights.send.tensor")
        if name in names:
            raise WeightSyncError(f"the trainer hands out two weights named {name!r}")
        names.add(name)
        sent.add(name, tensor, dtype)
        yield name, tensor.detach()
