"""Whether process groups are given back while the trainer sleeps."""

from tidemill.units import MIB, format_bytes

__all__ = ["GROUP_BYTES", "parks_groups"]

GROUP_BYTES = 2048 * MIB
"""Of one rank on a GPU: NCCL was seen to hold 484 MiB for one world, and more for every group besides."""


def parks_groups(
    mode: str, *, offload: str, device: str, ranks: int, budget: int, engine_bytes: int
) -> tuple[bool, str]:
    """Whether to, and a sentence about it, empty when there is nothing to say.

    `mode` is `residency.park_groups`, `offload` the mode that holds for the trainer. On a CPU groups hold no device
    memory; on a GPU it costs two to five tenths of a second a step to make them again.
    """
    if ranks == 1:
        without = "residency.park_groups is always, which has no effect with one rank: it has no process groups"
        return False, without if mode == "always" else ""
    if mode != "auto":
        return (
            mode == "always",
            f"process groups are {'given back' if mode == 'always' else 'kept'} while trainer sleeps",
        )
    if device == "cpu":
        return False, ""
    if offload != "always" and engine_bytes + GROUP_BYTES <= budget:
        return False, (
            f"process groups stay while trainer sleeps: the engine ({format_bytes(engine_bytes)}) has room beside them"
        )
    return True, "process groups are given back while trainer sleeps: the engine may need their memory"
