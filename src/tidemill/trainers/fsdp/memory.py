"""The memory of one rank: what survives sleep and is saved, and what belongs to one pass only.

Nothing here communicates.
"""

import contextlib
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from tidemill.contracts.checkpoint import Saved, Snapshot
from tidemill.contracts.events import Emit, Notice, PhaseDone
from tidemill.contracts.footprint import Part
from tidemill.contracts.landing import NOWHERE, Landing
from tidemill.contracts.residency import Moved
from tidemill.errors import CheckpointError
from tidemill.residency.device_memory import ResizedStorage, kept_addresses
from tidemill.residency.leaks import leak_gate
from tidemill.residency.ledger import Entry
from tidemill.residency.residue import residue_of
from tidemill.residency.savers.crossing import Captured
from tidemill.residency.savers.host_arena import HostArenaSaver
from tidemill.residency.savers.promised import Promises
from tidemill.trainers.common import gradients
from tidemill.trainers.fsdp.arriving import wait_at_once, wait_by_layer
from tidemill.trainers.fsdp.fresh_moments import ACCEPTED, with_fresh_moments
from tidemill.trainers.fsdp.model import Predictor
from tidemill.trainers.fsdp.optimizer import AdamW
from tidemill.trainers.fsdp.pieces import boxes, local, whole_and_offset
from tidemill.trainers.fsdp.ranks import Ranks
from tidemill.trainers.fsdp.sharding import reshard

__all__ = ["RankMemory"]

_TOLD = 0.001  # seconds of waiting that are worth a word


class RankMemory:
    """Parameters, buffers and moments, of which several ranks have pieces; all of it exists when this is made.

    Versions stand for contents: whoever changes something uses another from then on.
    """

    def __init__(
        self,
        *,
        predictor: Predictor,
        optimizer: AdamW,
        ranks: Ranks,
        device: torch.device,
        page_bytes: int,
        spare_bytes: int | None,
        deadline: float,
        keep_addresses: bool,
        stop_on_leak: bool,
        emit: Emit,
    ) -> None:
        """What a `HostArenaSaver` is made with; `stop_on_leak` as the transformers engine has it."""
        self._predictor = predictor
        self._optimizer = optimizer
        self._ranks = ranks
        self._parameters = optimizer.parameters
        self._grad_bytes = sum(local(tensor).nbytes for tensor in self._parameters.values())
        self._grads_awake = True
        self._sleeps_follow = False
        self._saver = HostArenaSaver(
            device=device,
            page_bytes=page_bytes,
            spare_bytes=spare_bytes,
            pin=device.type == "cuda",
            deadline=deadline,
            warn=lambda text: emit(Notice(text=text, level="warning")),
            make_memory=kept_addresses(device) if keep_addresses else ResizedStorage,
        )
        self._leaks = leak_gate("trainer", device, stop=stop_on_leak, emit=emit)
        self._residue = residue_of(device)
        self._saver.follow(predictor)
        moments = self._optimizer.state()
        for name, (tensor, part) in self._state().items():
            if ranks.count > 1 and name in moments:
                whole, offset = whole_and_offset(self._parameters[name.split("/", 2)[2]])
                self._saver.add(name, tensor, part, whole=whole, offset=offset)
            else:
                self._saver.add(name, tensor, part)
        self._saver.freeze()
        # Made once: a hand-over asks before each weight.
        self._names: dict[Part, list[str]] = {}
        for entry in self._saver.ledger:
            self._names.setdefault(entry.part, []).append(entry.name)
        self._emit = emit
        self._promises = Promises(self._saver, self._is_mine)
        self._copies_beside = device.type != "cpu"
        wait = wait_by_layer if ranks.count == 1 else wait_at_once
        wait(predictor, self._saver.arrived)

    def _state(self) -> dict[str, tuple[Tensor, Part]]:
        """All that must survive sleep, as it is now, by its name in a checkpoint."""
        network = self._predictor.network
        found: dict[str, tuple[Tensor, Part]] = {}
        # In the order in which a pass needs them, which is that of a wake: the first layer waits for the buffers.
        found |= {f"buffer/{name}": (tensor, Part.WEIGHTS) for name, tensor in network.named_buffers()}
        found |= {f"model/{name}": (tensor, Part.WEIGHTS) for name, tensor in network.named_parameters()}
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
        """Its bytes may be on their way when it returns: passes wait for them; who else touches them calls `ready`.

        Raises ResidencyError, and is as before, when memory runs out.
        """
        on_their_way = self._saver.restore(part, wait=False)
        self._grads_awake = self._grads_awake or Part.GRADS in part
        return Moved(beside=on_their_way)

    def arrive(self, part: Part) -> Generator[int, None, Moved]:
        """See Swappable. Room for gradients is taken first."""
        if Part.GRADS in part and not self._grads_awake and self._grad_bytes:
            yield self._grad_bytes
        copied = yield from self._saver.arrive(part)
        self._grads_awake = self._grads_awake or Part.GRADS in part
        return Moved(copied=copied)

    def ready(self, part: Part) -> None:
        """Wait until `part` is there, if it is on its way."""
        for one in part:
            self._saver.arrived(self._names.get(one, []))

    def sleep(self, version: int) -> Moved:
        """Copy to the host unless it is there already, and give the device memory back."""
        self._prepare_sleep()
        with self._gradients_following():
            captured = self._saver.capture(version)
            self._saver.release(version)
        return self._moved(captured)

    def leave(self, version: int) -> Generator[int, None, Moved]:
        """See Swappable. The room of gradients is given first."""
        self._prepare_sleep()
        with self._gradients_following():
            if self._grads_awake and self._grad_bytes:
                yield self._grad_bytes
            captured = yield from self._saver.leave(version)
        return self._moved(captured)

    @contextlib.contextmanager
    def _gradients_following(self) -> Iterator[None]:
        """Room for gradients goes with the rest, also when that ends asleep because it failed."""
        try:
            yield
        finally:
            self._grads_awake = self._grads_awake and bool(self._saver.resident_part())

    def _moved(self, captured: Captured) -> Moved:
        return Moved(copied=captured.copied, beside=captured.beside, waited=captured.waited, left=self._residue.left())

    def _prepare_sleep(self) -> None:
        self._sleeps_follow = True
        self.drop()
        self._saver.check_covers({name: tensor for name, (tensor, _) in self._state().items()})
        self._leaks.check()

    def drop(self) -> None:
        """What belongs to one pass only: gathered parameters, and gradients."""
        reshard(self._predictor)
        gradients.drop(list(self._parameters.values()))

    def changed(self, version: int) -> None:
        """An update is over. Where the last one was followed by a sleep, copying begins, beside what comes before it.

        What fails here fails again, and is told, when the copy is needed.
        """
        follows, self._sleeps_follow = self._sleeps_follow, False
        if follows:
            with contextlib.suppress(Exception):
                self._saver.begin_capture(version)

    def holds(self, version: int) -> bool:
        """Whether the host pages hold this version, whole."""
        return self._saver.sealed_key == version

    def settle(self) -> None:
        """Every snapshot has its copy: contents may change. A wait for it is told of."""
        start, began = time.time(), time.perf_counter()
        self._promises.settle()
        seconds = time.perf_counter() - began
        if seconds > _TOLD:
            self._emit(PhaseDone(name="save_stall", start=start, seconds=seconds, owner="trainer"))

    def snapshot(self, version: int, extra: Mapping[str, object]) -> Snapshot:
        """The present contents, of this rank's pieces; what several ranks hold the same is the first one's.

        The copy to the host is begun, where it goes on by itself; who reads waits for it.
        """
        kept = self._promises.snapshot(version)
        if self._copies_beside and not self.holds(version):
            with contextlib.suppress(Exception):
                self._saver.begin_capture(version)
        return replace(kept, extra=extra)

    def _is_mine(self, entry: Entry) -> bool:
        if self._ranks.rank == 0:
            return True
        return self._ranks.rank < self._ranks.shards and not entry.name.startswith("buffer/") and entry.bytes > 0

    def landing(self) -> Landing:
        """Where a checkpoint is read to, when snapshots have their copies; nothing lands of what this is a rank of."""
        self.settle()
        return self._saver.landing()

    def load(self, saved: Saved, version: int) -> bool:
        """Of whole tensors this rank's pieces, as contents `version`; the host pages hold them too, then.

        Whether moments are missing and begin at zero, as `saved` accepts.
        Raises CheckpointError, and changes nothing, unless all fit.
        """
        tensors, landing, moments = saved.tensors, saved.landing, self._optimizer.state()
        missing = sorted(set(moments) - set(tensors))
        if missing:
            absent = f"{len(missing)} tensors of the optimizer are not in the checkpoint ({missing[0]}, ...)"
            if ACCEPTED not in saved.accept:
                raise CheckpointError(
                    f"cannot load the trainer: {absent}, and without them training would start afresh in silence; use "
                    "a whole checkpoint, start a new run from its exported model, or accept a fresh optimizer with "
                    f'checkpoint.accept = ["{ACCEPTED}"]'
                )
            # Some moments may have landed, and none of them counts.
            tensors, landing = with_fresh_moments(tensors, self._saver.ledger, moments), NOWHERE
        self.settle()
        reshard(self._predictor)
        self._saver.load(boxes(self._saver.ledger, tensors), key=version, landing=landing)
        if missing and self._ranks.rank == 0:
            text = f"{absent}: all moments begin at zero and steps count from 0 (checkpoint.accept has {ACCEPTED})"
            self._emit(Notice(text=text, level="warning"))
        return bool(missing)

    def close(self) -> None:
        """Unpin the host pages, with the copies in them that snapshots still wait for."""
        self._promises.settle()
        self._saver.close()
