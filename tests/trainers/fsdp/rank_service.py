"""Ranks of the trainer in forked processes, as tests call them: a service for each, and a driver's part of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tidemill.algorithms.deal import deal, deal_rows
from tidemill.contracts.algorithm import Loss
from tidemill.contracts.batch import Batch
from tidemill.contracts.checkpoint import HeldTensor, Saved, TensorBytes
from tidemill.contracts.events import Emit, ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.workers import Place
from tidemill.models.stored import WeightReader
from tidemill.testing.spawned import SpawnedGroup
from tidemill.trainers.common.schedule import PhaseSettings
from tidemill.trainers.fsdp.model import load_predictor
from tidemill.trainers.fsdp.sharding import shard_predictor
from tidemill.trainers.fsdp.trainer import FsdpTrainer

RL = PhaseSettings(
    lr=1e-3,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.01,
    schedule="constant",
    warm_up_steps=0,
    min_ratio=0.0,
    total_steps=100,
)
DEADLINE = 60.0


def trainer_settings(model: Path) -> dict[str, Any]:
    """What `FsdpTrainer` is built with, but for its place."""
    return {
        "model": model,
        "compute_dtype": "float32",
        "tokens_per_micro_batch": 40,
        "minibatches": 1,
        "recompute": False,
        "max_grad_norm": 1.0,
        "phases": {"rl": RL},
        "page_bytes": 1 << 16,
        "spare_bytes": 1 << 22,  # for tests that hold several versions
        "deadline": DEADLINE,
    }


class CountingReader:
    """Implements `WeightReader`: how many rows of each tensor were read."""

    def __init__(self, reader: WeightReader) -> None:
        self._reader = reader
        self.rows_read: dict[str, int] = {}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._reader.shapes()

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        self.rows_read[name] = self.rows_read.get(name, 0) + stop - start
        return self._reader.rows(name, start, stop)


class RankService:
    """One rank's trainer, awake and in its phase "rl"; its gate is open but between `sleep` and `wake_up`."""

    def __init__(self, settings: Mapping[str, Any], place: Place, emit: Emit) -> None:
        torch.set_num_threads(1)
        self.trainer = FsdpTrainer(place=place, emit=emit, **settings)
        self.trainer.gate.open(Part.ALL)
        self.trainer.begin("rl")

    def close(self) -> None:
        self.trainer.close()

    def update(self, minibatches: Sequence[Batch], loss: Loss) -> tuple[dict[str, float], str]:
        report = self.trainer.update(minibatches, loss)
        return dict(report.metrics), report.skipped

    def step(self, batch: Batch, loss: Loss) -> tuple[dict[str, float], str]:
        report = self.trainer.step(batch, loss)
        return dict(report.metrics), report.skipped

    def log_probs(self, batch: Batch) -> np.ndarray:
        return self.trainer.log_probs(batch)

    def weights(self) -> dict[str, np.ndarray]:
        return {name: tensor.numpy().copy() for name, tensor in self.trainer.named_weights()}

    def specs(self) -> dict[str, Any]:
        return dict(self.trainer.weight_specs())

    def buffers(self) -> dict[str, np.ndarray]:
        return {name: tensor.numpy().copy() for name, tensor in self.trainer._network.named_buffers()}

    def local_elements(self) -> dict[str, int]:
        tensors = self.trainer._parameters
        return {name: tensor.to_local().numel() for name, tensor in tensors.items()}  # type: ignore[attr-defined]

    def rows_read(self, model: Path) -> dict[str, int]:
        """What a rank reads of a model's files when it starts."""
        readers: list[CountingReader] = []

        def read(reader: WeightReader) -> WeightReader:
            readers.append(CountingReader(reader))
            return readers[0]

        shard = partial(shard_predictor, mesh=self.trainer._ranks.mesh, compute_dtype=torch.float32)
        load_predictor(model, device=torch.device("cpu"), recompute=False, shard=shard, read=read)
        return readers[0].rows_read

    def fail_in_layer(self, number: int) -> None:
        """Let the next backward pass fail once it has come to this layer."""
        layer = self.trainer._network.get_decoder().layers[number]

        def fail(gradient: torch.Tensor) -> None:
            raise MemoryError("no room for a gradient")

        def hook(module: Any, given: Any, output: torch.Tensor) -> None:
            handle.remove()
            output.register_hook(fail)

        handle = layer.mlp.register_forward_hook(hook)

    def footprints(self) -> dict[str, int]:
        return {str(part.name): self.trainer.footprint(part) for part in Part.ALL}

    def resident(self) -> Part:
        return self.trainer.resident()

    def sleep(self) -> None:
        self.trainer.gate.close(Part.ALL)
        self.trainer.sleep()

    def wake_up(self) -> None:
        self.trainer.wake_up(Part.ALL)
        self.trainer.gate.open(Part.ALL)

    def park(self) -> None:
        self.trainer.park()

    def revive(self) -> None:
        self.trainer.revive()

    def pieces(self) -> tuple[dict[str, TensorBytes], dict[str, Any]]:
        """This rank's snapshot, as bytes of their own."""
        snapshot = self.trainer.snapshot()
        try:
            return {name: _copied(tensor) for name, tensor in snapshot.tensors.items()}, dict(snapshot.extra)
        finally:
            snapshot.release()

    def load(self, saved: Saved) -> None:
        self.trainer.load(saved)


def _copied(tensor: HeldTensor) -> TensorBytes:
    spec, data = tensor.spec, memoryview(bytes(tensor.data))
    return TensorBytes(dtype=tensor.dtype, shape=tensor.shape, data=data, whole=spec.whole, offset=spec.offset)


@dataclass(frozen=True, eq=False)
class RankGroup:
    """All ranks of one trainer, as a driver would call them. What they must agree on is asserted here."""

    group: SpawnedGroup
    minibatches: int

    @property
    def ranks(self) -> int:
        return len(self.group.names)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return self.group.call(method, *arguments, deadline=DEADLINE)

    def agreed(self, method: str, *arguments: Any) -> Any:
        every = self.call(method, *arguments)
        assert all(value == every[0] for value in every)
        return every[0]

    def step(self, batch: Batch, loss: Loss) -> tuple[dict[str, float], str]:
        """The report, which is the same on every rank."""
        dealt = deal(batch, ranks=self.ranks, minibatches=self.minibatches)
        reports = self.group.call_each(
            "update", [([share.batch for share in own], loss) for own in dealt], deadline=DEADLINE
        )
        assert all(report == reports[0] for report in reports)
        found: tuple[dict[str, float], str] = reports[0]
        return found

    def log_probs(self, batch: Batch) -> np.ndarray:
        dealt = deal_rows(batch, ranks=self.ranks)
        shares = self.group.call_each("log_probs", [(share.batch,) for share in dealt], deadline=DEADLINE)
        found = np.full(batch.tokens, np.nan, np.float32)
        for share, values in zip(dealt, shares, strict=True):
            found[share.positions] = values
        return found

    def weights(self) -> dict[str, np.ndarray]:
        """Gathered whole, the same on every rank."""
        every = self.call("weights")
        for other in every[1:]:
            assert list(other) == list(every[0])
            assert all((other[name] == value).all() for name, value in every[0].items())
        found: dict[str, np.ndarray] = every[0]
        return found

    def saved(self) -> Saved:
        """The pieces of all ranks put together; no element may be missing or come twice."""
        every = self.call("pieces")
        assert all(extra == every[0][1] for _, extra in every)
        return Saved(tensors=joined([pieces for pieces, _ in every]), extra=every[0][1])


def joined(ranks: Sequence[Mapping[str, TensorBytes]]) -> dict[str, TensorBytes]:
    """Whole tensors of the pieces of all ranks, float32."""
    wholes: dict[str, np.ndarray] = {}
    counts: dict[str, np.ndarray] = {}
    for name, piece in (item for pieces in ranks for item in pieces.items()):
        spec = piece.spec
        assert spec.dtype == "F32"
        whole = wholes.setdefault(name, np.zeros(spec.whole, np.float32))
        count = counts.setdefault(name, np.zeros(spec.whole, np.int64))
        box = tuple(slice(start, start + size) for start, size in zip(spec.offset, spec.shape, strict=True))
        whole[box] = np.frombuffer(piece.data, np.float32).reshape(spec.shape)
        count[box] += 1
    assert all((count == 1).all() for count in counts.values())
    return {
        name: TensorBytes(dtype="F32", shape=whole.shape, data=memoryview(whole.tobytes()))
        for name, whole in wholes.items()
    }


class Groups:
    """Groups of ranks, one of each size: processes stay for the next trainer, which ends the one before."""

    def __init__(self) -> None:
        self._open: dict[int, SpawnedGroup] = {}

    def start(self, model: Path, ranks: int, **changes: Any) -> RankGroup:
        settings = trainer_settings(model) | changes
        if ranks in self._open:
            self._open[ranks].call("close", deadline=DEADLINE)
        else:
            self._open[ranks] = SpawnedGroup("trainer", ranks, emit=ignore)
        self._open[ranks].build(partial(RankService, settings), meet=True)
        return RankGroup(self._open[ranks], settings["minibatches"])

    def close(self) -> None:
        for group in self._open.values():
            group.close()


def alone(model: Path, **changes: Any) -> RankService:
    """The one rank that is a world, in this process."""
    return RankService(trainer_settings(model) | changes, Place(), ignore)
