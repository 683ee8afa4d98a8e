"""Ways to save the state of a trainer that sleeps between its steps, each as durable as the others.

What `save` is given lies on the device and changes soon after. Whoever is durable later than `save` returns says when;
until then a way may hold on to host memory, and to nothing of the device.
"""

import shutil
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.checkpoint.disk import make_durable
from benchmarks.checkpoint.house import House, make_manager, run_state
from tidemill.checkpoint.catalog import checkpoint_name
from tidemill.contracts.events import CheckpointEvent, Event

__all__ = ["ARMS", "OURS", "Arm", "arms_on", "is_ours"]

OURS = ("tidemill-asleep", "tidemill-awake")
_PINNED_SINCE = (2, 13)


class Arm(Protocol):
    """One way, over one house. `folder` is where the newest save lies."""

    @property
    def folder(self) -> Path:
        """Of the newest save that is durable."""
        ...

    def save(self) -> None:
        """Under the trainer's lease: save what is there now. What is in the device's memory may change afterwards."""
        ...

    def durable(self) -> float | None:
        """When the last save was durable (`time.perf_counter`); None while it is not."""
        ...

    def finish(self) -> None:
        """Wait until nothing is written and older saves are gone. Raises what went wrong."""
        ...

    def load(self) -> None:
        """Under the trainer's lease: the newest save into the trainer's tensors."""
        ...

    def close(self) -> None:
        """Before the house is."""
        ...


class Tidemill:
    """The checkpointer that runs have."""

    def __init__(self, house: House, folder: Path) -> None:
        self._house = house
        self._root = folder / "checkpoints"
        self._step = 0
        self._durable: float | None = None
        self.commit_seconds = 0.0
        self._manager = make_manager(self._root, house, self._note)
        with house.residency.awake(house.trainer):
            self._manager.restore()

    @property
    def folder(self) -> Path:
        """By the step."""
        return self._root / checkpoint_name(self._step)

    def _note(self, event: Event) -> None:
        self._house.note(event)
        if isinstance(event, CheckpointEvent) and event.status == "durable":
            self._durable, self.commit_seconds = time.perf_counter(), event.seconds

    def save(self) -> None:
        """Mark it, as a loop does after a step."""
        self._step += 1
        self._durable = None
        self._manager.save_if_due(run_state(self._step))

    def durable(self) -> float | None:
        """When it was told."""
        return self._durable

    def finish(self) -> None:
        """Raises CheckpointError."""
        self._manager.drain()

    def load(self) -> None:
        """As a start of the run does: every checksum verified, every part loaded, and what a save needs tried."""
        state = make_manager(self._root, self._house, self._note).restore()
        if state is None or state.step != self._step:
            raise RuntimeError(f"step {self._step} was saved, and {state} came back")

    def close(self) -> None:
        """Nothing is held."""


class Peer:
    """Another library over the live tensors: durable when `save` returns."""

    def __init__(self, house: House, folder: Path) -> None:
        self._root = folder
        self._house = house
        self._count = 0
        self._durable: float | None = None

    @property
    def folder(self) -> Path:
        """One a save."""
        return self._root / f"save-{self._count}"

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The trainer's own, by name."""
        return self._house.trainer.tensors

    def save(self) -> None:
        """Write, then fsync files and folders."""
        self._durable = None
        self._count += 1
        self.folder.mkdir()
        self.write(self.folder)
        make_durable(self.folder)
        self._durable = time.perf_counter()

    def durable(self) -> float | None:
        """As noted."""
        return self._durable

    def finish(self) -> None:
        """Remove older saves."""
        for number in range(1, self._count):
            shutil.rmtree(self._root / f"save-{number}", ignore_errors=True)

    def write(self, folder: Path) -> None:
        """Into `folder`."""
        raise NotImplementedError

    def load(self) -> None:
        """See Arm."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is held."""

    def take(self, loaded: dict[str, torch.Tensor]) -> None:
        """Copy what was loaded into the trainer's tensors."""
        for name, tensor in self.tensors.items():
            tensor.copy_(loaded[name])


class TorchSave(Peer):
    """One pickle."""

    def write(self, folder: Path) -> None:
        """`torch.save` of the dictionary."""
        torch.save(self.tensors, folder / "state.pt")

    def load(self) -> None:
        """To the device at once."""
        device = next(iter(self.tensors.values())).device
        self.take(torch.load(self.folder / "state.pt", map_location=device, weights_only=True))


class Safetensors(Peer):
    """One safetensors file, by its own library."""

    def write(self, folder: Path) -> None:
        """`save_file`."""
        from safetensors.torch import save_file

        save_file(self.tensors, folder / "state.safetensors")

    def load(self) -> None:
        """To the device at once."""
        from safetensors.torch import load_file

        device = next(iter(self.tensors.values())).device
        self.take(load_file(self.folder / "state.safetensors", device=str(device)))


class Dcp(Peer):
    """torch.distributed.checkpoint, one process, which fsyncs its files itself."""

    def __init__(self, house: House, folder: Path) -> None:
        super().__init__(house, folder)
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")

    def write(self, folder: Path) -> None:
        """`save`."""
        import torch.distributed.checkpoint as dcp

        dcp.save(dict(self.tensors), checkpoint_id=folder, no_dist=True)

    def load(self) -> None:
        """In place, as it does."""
        import torch.distributed.checkpoint as dcp

        dcp.load(dict(self.tensors), checkpoint_id=self.folder, no_dist=True)


class DcpAsync(Dcp):
    """The same behind the loop: staged in host memory, then written by a thread."""

    def __init__(self, house: House, folder: Path) -> None:
        super().__init__(house, folder)
        self._stager: Any = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread()

    def save(self) -> None:
        """Return when it is staged: the trainer sleeps soon."""
        import torch.distributed.checkpoint as dcp

        self._durable = None
        self._count += 1
        self.folder.mkdir()
        response: Any = dcp.async_save(
            dict(self.tensors), checkpoint_id=self.folder, async_stager=self._stager, no_dist=True
        )
        upload = response
        if not isinstance(response, Future):
            upload = response.upload_completion
            response.staging_completion.result()
        self._thread = threading.Thread(target=self._wait_for, args=(upload, self.folder), daemon=True)
        self._thread.start()

    def _wait_for(self, upload: Any, folder: Path) -> None:
        try:
            upload.result()
            make_durable(folder)
            self._durable = time.perf_counter()
        except BaseException as error:
            self._failure = error

    def finish(self) -> None:
        """Raises what the thread did."""
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        super().finish()


class DcpAsyncPinned(DcpAsync):
    """With a stager of pinned memory that is kept from save to save, on a GPU."""

    def __init__(self, house: House, folder: Path) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        super().__init__(house, folder)
        self._stager = DefaultStager(StagingOptions(use_shared_memory=False))

    def close(self) -> None:
        """End its threads."""
        self._stager.close()


ARMS: dict[str, Callable[[House, Path], Arm]] = {
    "tidemill-asleep": Tidemill,
    "tidemill-awake": Tidemill,
    "dcp": Dcp,
    "dcp-async": DcpAsync,
    "dcp-async-pinned": DcpAsyncPinned,
    "torch-save": TorchSave,
    "safetensors": Safetensors,
}


def is_ours(arm: str) -> bool:
    """Whether it is Tidemill's."""
    return arm in OURS


def arms_on(device: str) -> tuple[list[str], str]:
    """Names of the arms that can run there, in the order in which they take turns; and why others cannot."""
    if device == "cpu":
        return [name for name in ARMS if name != "dcp-async-pinned"], "dcp-async-pinned is left out: it needs a GPU"
    version = tuple(int(number) for number in torch.__version__.split("+")[0].split(".")[:2])
    if version < _PINNED_SINCE:
        why = f"dcp-async-pinned is left out: the pinned stager of torch {torch.__version__} works once, 2.13 is needed"
        return [name for name in ARMS if name != "dcp-async-pinned"], why
    return list(ARMS), ""
