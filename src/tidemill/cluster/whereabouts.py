"""Where a process runs: what decides how bytes reach it."""

import platform
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Whereabouts", "whereabouts"]

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True)
class Whereabouts:
    """`host` is one machine since its start; `gpu` is the unique id of a GPU, empty for a process that uses none."""

    host: str
    gpu: str = ""

    def shares_gpu(self, other: "Whereabouts") -> bool:
        """Whether both use one GPU of one machine."""
        return bool(self.gpu) and self == other


def whereabouts() -> Whereabouts:
    """Of this process. A GPU counts from its first use here."""
    # The name alone is not enough: hosts of one image may all be called the same.
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    gpu = ""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return Whereabouts(host=f"{platform.node()}/{boot}", gpu=gpu)
