"""The model folder at the end of a run: tried before the first step, written after the last, kept by later starts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from tidemill.app.run_folder import RunFolder
from tidemill.checkpoint.catalog import checkpoint_name
from tidemill.checkpoint.export import export_model, is_export_of, rehearse_export
from tidemill.checkpoint.stored import read_checkpoint, weights_of
from tidemill.config.run import RunConfig
from tidemill.contracts.checkpoint import SavedTensor
from tidemill.contracts.events import Notice
from tidemill.contracts.footprint import Part
from tidemill.contracts.parts import Parts
from tidemill.errors import CheckpointError

__all__ = ["exported", "rehearse"]

_PREFIX = "model/"


def rehearse(config: RunConfig, folder: RunFolder, parts: Parts) -> None:
    """Find out now, not after the last step, that the export cannot be written. Raises CheckpointError."""
    if not config.checkpoint.export:
        return
    weights, dtype = parts.trainer.weight_specs(), config.checkpoint.export_dtype
    rehearse_export(weights=weights, base=config.model, parent=folder.export, dtype=dtype)


def exported(config: RunConfig, folder: RunFolder, parts: Parts, *, step: int) -> Path | None:
    """The model of `step`, the last one, as a Hugging Face folder.

    Written from the trainer's host copy; when that lies in pieces with several ranks, from the checkpoint of `step`,
    which is durable by then. One that an earlier start wrote stays if it is the same. Raises CheckpointError when it
    is another.
    """
    if not config.checkpoint.export:
        return None
    target = folder.export / f"step-{step:08d}"
    with _weights(folder, parts, step) as weights:
        return _kept(config, target, weights, parts) or export_model(
            weights=weights,
            base=config.model,
            target=target,
            dtype=config.checkpoint.export_dtype,
            emit=parts.recorder.emit,
        )


@contextmanager
def _weights(folder: RunFolder, parts: Parts, step: int) -> Iterator[Mapping[str, SavedTensor]]:
    trainer = parts.trainer
    asleep = trainer.resident() == Part.NONE
    with nullcontext() if asleep else parts.residency.awake(trainer):
        snapshot = trainer.snapshot()
    try:
        if snapshot.shards:
            snapshot.release()
            yield weights_of(read_checkpoint(folder.checkpoints / checkpoint_name(step), step=step))
            return
        yield {name.removeprefix(_PREFIX): held for name, held in snapshot.tensors.items() if name.startswith(_PREFIX)}
    finally:
        snapshot.release()


def _kept(config: RunConfig, target: Path, weights: Mapping[str, SavedTensor], parts: Parts) -> Path | None:
    if not target.is_dir() or not any(target.iterdir()):
        return None
    if not is_export_of(target, weights=weights, base=config.model, dtype=config.checkpoint.export_dtype):
        raise CheckpointError(
            f"cannot export to {target}: it is there already and holds another model or dtype than this run's; move it "
            "away, and start the same command again"
        )
    parts.recorder.emit(Notice(text=f"{target} holds this very model already"))
    return target
