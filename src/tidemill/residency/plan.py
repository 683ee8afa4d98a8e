"""Which byte budget an offload mode stands for, and the sentence that tells the user so."""

import sys

from tidemill.errors import ResidencyError
from tidemill.units import format_bytes

__all__ = ["AUTO_SHARE", "NO_LIMIT", "budget_for"]

NO_LIMIT = sys.maxsize

# The rest is for the context, the allocator's slack, activations that no ledger lists, and other processes.
AUTO_SHARE = 0.9


def budget_for(
    mode: str, *, trainer_bytes: int, engine_weight_bytes: int, engine_bytes: int, device_bytes: int
) -> tuple[int, str]:
    """The budget in bytes, and a sentence about the choice.

    `trainer_bytes` and `engine_bytes` are whole footprints. `always` leaves room for the largest moment in which
    parts must be awake together: the trainer beside the engine's weights while they are handed over, or the engine
    alone while it generates. Raises ResidencyError for an unknown mode.
    """
    together = max(trainer_bytes + engine_weight_bytes, engine_bytes)
    everything = trainer_bytes + engine_bytes
    match mode:
        case "always":
            return together, (
                f"offload is always: the budget is {format_bytes(together)}, what must be awake at once; "
                f"trainer ({format_bytes(trainer_bytes)}) and engine ({format_bytes(engine_bytes)}) take turns"
            )
        case "never":
            return (
                NO_LIMIT,
                f"offload is never: trainer and engine ({format_bytes(everything)}) both stay on the device",
            )
        case "auto":
            budget = int(device_bytes * AUTO_SHARE)
            outcome = "both stay awake" if everything <= budget else "they take turns"
            return budget, (
                f"offload is auto: {format_bytes(budget)} of {format_bytes(device_bytes)} may be used, trainer and "
                f"engine need {format_bytes(everything)}, so {outcome}"
            )
    raise ResidencyError(f"unknown offload mode {mode!r}; use auto, always or never")
