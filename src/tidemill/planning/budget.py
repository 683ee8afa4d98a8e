"""Which byte budget an offload mode stands for, and the sentence that tells the user so."""

import sys

from tidemill.errors import ConfigError, ResidencyError
from tidemill.units import format_bytes

__all__ = ["AUTO_SHARE", "NO_LIMIT", "budget_for", "check_budget", "offload_mode"]

NO_LIMIT = sys.maxsize

# The rest is for the context, the allocator's slack, activations that no ledger lists, and other processes.
AUTO_SHARE = 0.9


def offload_mode(*, trainer: str, engine: str, residency: str) -> str:
    """The mode that holds: the trainer's own or the engine's, which never contradict each other, else the common."""
    own = {mode for mode in (trainer, engine) if mode != "auto"}
    return own.pop() if own else residency


def budget_for(
    mode: str, *, trainer_bytes: int, engine_weight_bytes: int, engine_bytes: int, device_bytes: int
) -> tuple[int, str]:
    """The budget in bytes, and a sentence about the choice.

    `trainer_bytes` and `engine_bytes` are whole footprints. `always` leaves room for the largest moment in which
    parts must be awake together: the trainer beside the engine's weights while they are handed over, or the engine
    alone while it generates. Raises ResidencyError for an unknown mode.
    """
    together = _together(trainer_bytes, engine_weight_bytes, engine_bytes)
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


def check_budget(budget: int, *, trainer_bytes: int, engine_weight_bytes: int, engine_bytes: int) -> None:
    """Raises ConfigError when `budget` has no room for what must be awake at once, whoever else sleeps.

    Better now than at the first rollout, which may be hours of supervised steps away.
    """
    needed = _together(trainer_bytes, engine_weight_bytes, engine_bytes)
    if budget < needed:
        there, asked = format_bytes(budget), format_bytes(needed)
        if there == asked:
            there, asked = f"{budget} B", f"{needed} B"
        raise ConfigError(
            f"cannot run within {there}: {asked} must be awake at once (trainer "
            f"{format_bytes(trainer_bytes)} beside the engine's weights {format_bytes(engine_weight_bytes)}, or engine "
            f"{format_bytes(engine_bytes)}); raise residency.budget, or lower engine.max_batch, data.max_prompt_tokens "
            f"or rollout.sampling.max_new_tokens, which size the engine"
        )


def _together(trainer_bytes: int, engine_weight_bytes: int, engine_bytes: int) -> int:
    """Bytes of the largest moment: the hand-over of weights, or generation."""
    return max(trainer_bytes + engine_weight_bytes, engine_bytes)
