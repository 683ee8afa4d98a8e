"""Random states of this process as one more part of a checkpoint: Python, numpy, torch and its devices.

Only libraries that the process has loaded are looked at: one that is not loaded has drawn nothing. Restoring brings
back the states of the devices that are there; a checkpoint from a machine with more of them, or others, still loads.
"""

import base64
import random
import sys
from collections.abc import Mapping
from typing import Any

from tidemill.contracts.checkpoint import Saved, Snapshot
from tidemill.errors import CheckpointError

__all__ = ["RandomState"]


class RandomState:
    """The generators that belong to no part of a run: a Stateful."""

    name = "random"

    def snapshot(self) -> Snapshot:
        """All states, copied."""
        version, words, gauss = random.getstate()
        extra: dict[str, Any] = {"python": {"version": version, "words": list(words), "gauss": gauss}}
        if "numpy" in sys.modules:
            extra["numpy"] = _numpy_state()
        if "torch" in sys.modules:
            extra |= _torch_states()
        return Snapshot(extra=extra)

    def load(self, saved: Saved) -> None:
        """Take on the saved states."""
        if saved.tensors:
            raise CheckpointError(f"cannot load random states: unexpected tensors {sorted(saved.tensors)}")
        try:
            python = saved.extra["python"]
            state = (python["version"], tuple(python["words"]), python["gauss"])
            before = random.getstate()
            random.setstate(state)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"cannot load random states: that of python is garbled ({error})") from None
        try:
            _load_libraries(saved.extra)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            random.setstate(before)
            raise CheckpointError(f"cannot load random states: {error}") from None


def _numpy_state() -> dict[str, Any]:
    import numpy

    state = numpy.random.get_state(legacy=False)
    words = [int(word) for word in state["state"]["key"]]
    fields = {"kind": state["bit_generator"], "words": words, "position": int(state["state"]["pos"])}
    return fields | {"has_gauss": int(state["has_gauss"]), "gauss": float(state["gauss"])}


def _torch_states() -> dict[str, Any]:
    import torch

    states: dict[str, Any] = {"torch": _encode(torch.get_rng_state().numpy().tobytes())}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = [_encode(state.numpy().tobytes()) for state in torch.cuda.get_rng_state_all()]
    return states


def _load_libraries(extra: Mapping[str, Any]) -> None:
    if "numpy" in extra:
        import numpy

        saved = extra["numpy"]
        words = numpy.array(saved["words"], dtype=numpy.uint32)
        numpy.random.set_state((saved["kind"], words, saved["position"], saved["has_gauss"], saved["gauss"]))
    if "torch" in extra:
        import torch

        torch.set_rng_state(torch.frombuffer(_decode(extra["torch"]), dtype=torch.uint8))
        present = torch.cuda.device_count() if torch.cuda.is_available() else 0
        for device, state in enumerate(extra.get("cuda", ())[:present]):
            torch.cuda.set_rng_state(torch.frombuffer(_decode(state), dtype=torch.uint8), device)


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _decode(text: str) -> bytearray:
    return bytearray(base64.b64decode(text, validate=True))
