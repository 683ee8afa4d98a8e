"""A training loop as it is written when sleep is a call among others, on the raw saver: for a child process.

    python naive_save.py HOW FILE

The step puts the trainer to sleep by itself, as somebody added one day; the save, which is older, reads parameters. The
exit code is 0 when the save went through. Beside FILE lie the weights as they were, in FILE.right.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from tidemill.contracts.footprint import Part
from tidemill.residency.savers.host_arena import HostArenaSaver

SHAPE = (100, 100)


class Trainer:
    """A parameter, and its memory."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)))
        self.optimizer = torch.optim.SGD([self.weight], lr=0.1)
        self.saver = HostArenaSaver(device="cpu", page_bytes=1 << 16, pin=False)
        self.saver.add("weight", self.weight, Part.WEIGHTS)
        self.saver.freeze()
        self.steps = 0

    def step(self, right: Path) -> None:
        self.weight.square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        right.write_bytes(self.weight.detach().clone().numpy().tobytes())
        self.sleep()

    def sleep(self) -> None:
        self.saver.capture(self.steps)
        self.saver.release(self.steps)


def by_copying(trainer: Trainer, path: Path) -> None:
    path.write_bytes(trainer.weight.detach().clone().numpy().tobytes())


def by_numpy(trainer: Trainer, path: Path) -> None:
    path.write_bytes(trainer.weight.detach().numpy().tobytes())


def by_safetensors(trainer: Trainer, path: Path) -> None:
    save_file({"weight": trainer.weight.detach()}, path)


def by_torch_save(trainer: Trainer, path: Path) -> None:
    torch.save({"weight": trainer.weight}, path)


HOWS: dict[str, Callable[[Trainer, Path], None]] = {
    "copy": by_copying,
    "numpy": by_numpy,
    "safetensors": by_safetensors,
    "torch-save": by_torch_save,
}

if __name__ == "__main__":
    file = Path(sys.argv[2])
    trainer = Trainer()
    trainer.step(file.with_suffix(".right"))
    # What was freed is somebody else's by now, as on a device that the engine has filled.
    others = [torch.full(SHAPE, 7.0) for _ in range(50)]
    HOWS[sys.argv[1]](trainer, file)
