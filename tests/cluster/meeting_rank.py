"""A rank whose process groups are real and whose numbers are not."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from tidemill import faults
from tidemill.contracts.algorithm import Loss
from tidemill.contracts.batch import Batch, StepReport
from tidemill.contracts.events import Emit
from tidemill.contracts.workers import Place
from tidemill.residency.groups import ProcessGroups
from tidemill.testing.fakes.rank_trainer import FakeRankTrainer

WAIT = 1.2  # seconds that a rank waits for the others


class MeetingRank(FakeRankTrainer):
    """Meets the others in gloo at each update."""

    def __init__(self, place: Place, emit: Emit) -> None:
        super().__init__(place, emit)
        # Processes do not start at the same moment.
        ProcessGroups(place=place, deadline=20.0).close()
        self.groups = ProcessGroups(place=place, deadline=WAIT)

    def park(self) -> None:
        self.groups.park()

    def revive(self) -> None:
        self.groups.revive()

    def update(self, minibatches: Sequence[Batch], loss: Loss) -> StepReport:
        faults.point("meeting.update")
        dist.all_reduce(torch.ones(1))
        return super().update(minibatches, loss)
