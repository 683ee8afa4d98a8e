"""The memory of one rank: what survives sleep and is saved, and what belongs to one pass only.

Nothing here communicates.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from tidemill.contracts.checkpoint import SavedTensor, Snapshot, TensorBytes
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Moved
from tidemill.errors import CheckpointError
from tidemill.residency.savers.host_arena import HostArenaSaver
from tidemill.trainers.common import gradients
from tidemill.trainers.fsdp.model import Predictor
from tidemill.trainers.fsdp.optimizer import AdamW
from tidemill.trainers.fsdp.pieces import boxes, local, whole_and_offset
from tidemill.trainers.fsdp.ranks import Ranks
from tidemill.trainers.fsdp.sharding import reshard

__all__ = ["RankMemory"]


class RankMemory:
    """Parameters, buffers and moments, of which several ranks have pieces; all of it exists when this is made.

    Versions stand for contents: whoever changes something uses another from then on.
    """

    def __init__(
        self, *, predictor: Predictor, optimizer: AdamW, ranks: Ranks, device: torch.device, page_bytes: int
    ) -> None:
        self._predictor = predictor
        self._optimizer = optimizer
        self._ranks = ranks
        self._parameters = optimizer.parameters
        self._grad_bytes = sum(local(tensor).nbytes for tensor in self._parameters.values())
        self._grads_awake = True
        self._saver = HostArenaSaver(device=device, page_bytes=page_bytes, pin=device.type == "cuda")
        self._saver.follow(predictor)
        moments = self._optimizer.state()
        for name, (tensor, part) in self._state().items():
            if ranks.count > 1 and name in moments:
                whole, offset = whole_and_offset(self._parameters[name.split("/", 2)[2]])
                self._saver.add(name, tensor, part, whole=whole, offset=offset)
            else:
                self._saver.add(name, tensor, part)
        self._saver.freeze()

    def _state(self) -> dict[str, tuple[Tensor, Part]]:
        """All that must survive sleep, as it is now, by its name in a checkpoint."""
        network = self._predictor.network
        found: dict[str, tuple[Tensor, Part]] = {}
        found |= {f"model/{name}": (tensor, Part.WEIGHTS) for name, tensor in network.named_parameters()}
        found |= {f"buffer/{name}": (tensor, Part.WEIGHTS) for name, tensor in network.named_buffers()}
        return found | {name: (tensor, Part.OPTIMIZER) for name, tensor in self._optimizer.state().items()}

    def resident(self) -> Part:
        """Gradients count as resident whenever there is leave to have them, also between two steps."""
        return self._saver.resident_part() | (Part.GRADS if self._grads_awake else Part.NONE)

    def footprint(self, part: Part) -> int:
        """Gradients are as large as the parameters. Activations and what is gathered for a pass are not counted."""
        return self._saver.device_bytes(part) + (self._grad_bytes if Part.GRADS in part else 0)

    def host_bytes(self) -> int:
        """Bytes of the host pages."""
        return self._saver.host_bytes()

    def wake_up(self, part: Part) -> Moved:
        """Raises ResidencyError, and is as before, when memory runs out."""
        copied = self._saver.restore(part)
        self._grads_awake = self._grads_awake or Part.GRADS in part
        return Moved(copied=copied)

    def sleep(self, version: int) -> Moved:
        """Copy to the host unless it is there already, and give the device memory back."""
        self.drop()
        self._saver.ledger.check_covers(self._state())
        copied = self._saver.capture(version)
        self._saver.release(version)
        self._grads_awake = False
        return Moved(copied=copied)

    def drop(self) -> None:
        """What belongs to one pass only: gathered parameters, and gradients."""
        reshard(self._predictor)
        gradients.drop(list(self._parameters.values()))

    def holds(self, version: int) -> bool:
        """Whether the host pages hold this version, whole."""
        return self._saver.sealed_key == version

    def capture(self, version: int) -> None:
        """Copy to the host, and stay awake."""
        self._saver.capture(version)

    def snapshot(self, extra: Mapping[str, object]) -> Snapshot:
        """The host pages, of this rank's pieces; what several ranks hold the same is the first one's."""
        kept = self._saver.snapshot()
        tensors = {name: tensor for name, tensor in kept.tensors.items() if self._is_mine(name, tensor)}
        return Snapshot(tensors=tensors, extra=extra, release=kept.release)

    def _is_mine(self, name: str, tensor: TensorBytes) -> bool:
        if self._ranks.rank == 0:
            return True
        return self._ranks.rank < self._ranks.shards and not name.startswith("buffer/") and tensor.data.nbytes > 0

    def load(self, tensors: Mapping[str, SavedTensor]) -> None:
        """Of whole tensors this rank's pieces. Raises CheckpointError, and changes nothing, unless all fit."""
        missing = sorted(set(self._optimizer.state()) - set(tensors))
        if missing:
            raise CheckpointError(
                f"cannot load the trainer: {len(missing)} tensors of the optimizer are not in the checkpoint "
                f"({missing[0]}, ...), and without them training would start afresh in silence; use a whole "
                "checkpoint, or start a new run from its exported model"
            )
        reshard(self._predictor)
        self._saver.load(boxes(self._saver.ledger, tensors))

    def close(self) -> None:
        """Unpin the host pages."""
        self._saver.close()
