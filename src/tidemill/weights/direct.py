"""Trainer and engine in one process, on one kind of device: weights are copied straight into live engine storage."""

from collections.abc import Iterator, Mapping

import torch

from tidemill import faults
from tidemill.contracts.events import Emit, phase
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Residency
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.weights import WeightReceiver, WeightSource
from tidemill.errors import WeightSyncError
from tidemill.weights.checksum import checksum

__all__ = ["DirectWeightSync"]

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
        try:
            with self._residency.awake(engine, Part.WEIGHTS), phase(self._emit, "update_weights", engine.name):
                self._hand_over(trainer, engine, version)
        except WeightSyncError:
            raise
        except Exception as cause:
            raise WeightSyncError(
                f"cannot bring {engine.name} to version {version}: {type(cause).__name__}: {cause}; it refuses to "
                "generate until a whole sync succeeds"
            ) from cause

    def _hand_over(self, trainer: WeightSource, engine: WeightReceiver, version: PolicyVersion) -> None:
        engine.begin_update()
        if engine.dtype not in _DTYPES:
            raise WeightSyncError(f"cannot cast to {engine.name}'s dtype {engine.dtype!r}; use one of {list(_DTYPES)}")
        sent: dict[str, int] = {}
        engine.load_weights(_sending(trainer, _DTYPES[engine.dtype], sent))
        _compare(sent, engine.weight_checksums(), engine.name)
        faults.point("weights.publish")
        engine.publish(version)


def _sending(trainer: WeightSource, dtype: torch.dtype, sent: dict[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
    """The trainer's weights as they are; the checksum that each should have in the engine is noted in `sent`."""
    for name, tensor in trainer.named_weights():
        faults.point("weights.send.tensor")
        if name in sent:
            raise WeightSyncError(f"the trainer hands out two weights named {name!r}")
        # The cast is for the checksum alone and gone at once: an engine may look at all tensors before it copies.
        sent[name] = checksum(tensor.detach().to(dtype))
        yield name, tensor.detach()


def _compare(sent: Mapping[str, int], held: Mapping[str, int], engine: str) -> None:
    missing, unexpected = sorted(set(held) - set(sent)), sorted(set(sent) - set(held))
    if missing or unexpected:
        raise WeightSyncError(
            f"{engine} holds {len(missing)} weights that the trainer did not send {missing[:5]}, and was sent "
            f"{len(unexpected)} that it does not hold {unexpected[:5]}; trainer and engine are not the same model"
        )
    differing = sorted(name for name in sent if sent[name] != held[name])
    if differing:
        raise WeightSyncError(
            f"{len(differing)} of {len(sent)} weights differ in {engine} after the copy, {differing[:5]}; it refuses "
            "to generate until a whole sync succeeds"
        )
