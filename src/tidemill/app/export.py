"""The model folder at the end of a run: tried before the first step, written after the last, kept by later starts."""

from collections.abc import Mapping
from pathlib import Path

from tidemill.app.run_folder import RunFolder
from tidemill.checkpoint.export import export_model, is_export_of, rehearse_export
from tidemill.config.run import RunConfig
from tidemill.contracts.checkpoint import SavedTensor
from tidemill.contracts.events import Notice
from tidemill.contracts.footprint import Part
from tidemill.contracts.parts import Parts
from tidemill.errors import CheckpointError
from tidemill.residency.dtypes import dtype_name

__all__ = ["exported", "rehearse"]

_PREFIX = "model/"


def rehearse(config: RunConfig, folder: RunFolder, parts: Parts) -> None:
    """Find out now, not after the last step, that the export cannot be written. Raises CheckpointError."""
    if not config.checkpoint.export:
        return
    with parts.residency.awake(parts.trainer, Part.WEIGHTS):
        weights = {
            name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in parts.trainer.named_weights()
        }
    settings = config.checkpoint
    rehearse_export(weights=weights, base=config.model, parent=folder.export, dtype=settings.export_dtype)


def exported(config: RunConfig, folder: RunFolder, parts: Parts, *, step: int) -> Path | None:
    """The model of `step`, which the trainer holds, as a Hugging Face folder written from the trainer's host copy.

    One that an earlier start wrote stays if it is the same. Raises CheckpointError when it is another.
    """
    if not config.checkpoint.export:
        return None
    target = folder.export / f"step-{step:08d}"
    with parts.residency.awake(parts.trainer):
        snapshot = parts.trainer.snapshot()
    try:
        weights = {
            name.removeprefix(_PREFIX): tensor for name, tensor in snapshot.tensors.items() if name.startswith(_PREFIX)
        }
        return _kept(config, target, weights, parts) or export_model(
            weights=weights,
            base=config.model,
            target=target,
            dtype=config.checkpoint.export_dtype,
            emit=parts.recorder.emit,
        )
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
