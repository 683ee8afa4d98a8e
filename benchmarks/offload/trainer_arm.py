"""The arm of case `fsdp` that is ours: a trainer, not only its saver."""

from pathlib import Path

from benchmarks.offload.arms import Settings
from benchmarks.offload.cases import fingerprint
from benchmarks.trainers import make_batch, make_trainer, state_of
from tidemill.algorithms.losses.cross_entropy import CrossEntropyLoss
from tidemill.contracts.footprint import Part
from tidemill.contracts.workers import Place

__all__ = ["Trainer"]


class Trainer:
    """The trainer itself, one rank of it: its own sleep and wake, and a step to change the contents."""

    def __init__(self, settings: Settings) -> None:
        case, model, rendezvous = settings
        place = Place(rank=case.rank, ranks=case.ranks, device=case.device, rendezvous=rendezvous)
        self.trainer = make_trainer(Path(model), place)
        self.trainer.gate.open(Part.ALL)
        self.trainer.begin("rl")
        self.change()
        self.bytes = sum(tensor.nbytes for tensor in state_of(self.trainer))

    def sleep(self, cycle: int) -> None:
        """A trainer copies what changed since it last slept: without a step between, it is told that it did."""
        self.trainer._version += 1
        self.trainer.sleep()

    def wake(self) -> None:
        """All parts."""
        self.trainer.wake_up(Part.ALL)

    def kept(self) -> float:
        """By its own account."""
        return float(self.trainer.footprint(self.trainer.resident()))

    def change(self) -> None:
        """One step."""
        self.trainer.step(make_batch(0, self.trainer.vocabulary), CrossEntropyLoss())

    def fingerprint(self) -> list[int]:
        """Of parameters, buffers and moments."""
        return fingerprint(state_of(self.trainer))

    def close(self) -> None:
        """Unpin, and end process groups."""
        self.trainer.close()
