"""The model folders of a run: beside saves and at the end, tried before the first step, kept by later starts."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from tidemill.app.run_folder import RunFolder
from tidemill.checkpoint.exports import Exports, NoExports, RunExports
from tidemill.config.run import RunConfig
from tidemill.contracts.checkpoint import Snapshot
from tidemill.contracts.events import Emit
from tidemill.contracts.footprint import Part
from tidemill.contracts.parts import Parts

__all__ = ["exported", "exports_of"]


def exports_of(config: RunConfig, folder: RunFolder, emit: Emit) -> Exports:
    """Those that the settings ask for."""
    settings = config.checkpoint
    if not settings.export and settings.export_every == 0:
        return NoExports()
    return RunExports(
        folder=folder.export,
        base=config.model,
        dtype=settings.export_dtype,
        every=settings.export_every,
        at_end=settings.export,
        last_step=config.steps,
        emit=emit,
    )


def exported(config: RunConfig, folder: RunFolder, parts: Parts, *, step: int) -> Path | None:
    """The model of `step`, the last one, as a Hugging Face folder.

    Each rank writes its own part of it, from its host copy. One that an earlier start wrote stays if it is the same.
    Raises CheckpointError when it is another.
    """
    exports = exports_of(config, folder, parts.recorder.emit)
    if not config.checkpoint.export or isinstance(exports, NoExports):
        return None
    with _snapshot(parts) as snapshot:
        return exports.write(step, [snapshot], last=True)


@contextmanager
def _snapshot(parts: Parts) -> Iterator[Snapshot]:
    trainer = parts.trainer
    asleep = trainer.resident() == Part.NONE
    with nullcontext() if asleep else parts.residency.awake(trainer):
        snapshot = trainer.snapshot()
    try:
        yield snapshot
    finally:
        snapshot.release()
