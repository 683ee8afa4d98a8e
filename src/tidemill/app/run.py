"""One start of a run, from its settings to its summary."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tidemill.app.assemble import assembled, chosen_device
from tidemill.app.recording import build_recorder
from tidemill.app.run_folder import RunFolder, read_json
from tidemill.app.signals import Signals
from tidemill.app.summary import summarize
from tidemill.checkpoint.attempts import next_attempt
from tidemill.checkpoint.export import export_model
from tidemill.checkpoint.lock import RunLock
from tidemill.config.load import Loaded
from tidemill.config.run import RunConfig
from tidemill.contracts.events import Notice
from tidemill.contracts.footprint import Part
from tidemill.contracts.parts import Parts
from tidemill.contracts.recorder import Recorder
from tidemill.loops import sync
from tidemill.recorders.report import write_report
from tidemill.units import format_bytes

__all__ = ["run"]


def run(loaded: Loaded, *, fresh: bool, quiet: bool, command: Sequence[str]) -> dict[str, Any]:
    """Run to the end, from the newest checkpoint if there is one; the summary, with `already_finished`.

    `fresh` sets aside what the run folder holds and starts at step 0. Raises TidemillError; whatever was acknowledged
    before is safe, and the page and summary say how far it came.
    """
    config = loaded.config
    folder = RunFolder(config.run.dir)
    with RunLock(folder.root), Signals() as stop:
        if fresh:
            folder.set_aside()
        earlier = read_json(folder.summary)
        if earlier.get("finished") and earlier.get("steps", 0) >= config.steps:
            return {**earlier, "already_finished": True}
        attempt = next_attempt(folder.root)
        device = chosen_device(config)
        settings = with_origins(loaded)
        folder.write_manifest(settings=settings, attempt=attempt, command=command, device=device)
        recorder = build_recorder(config, folder, quiet=quiet, settings=settings)
        outcome = _Outcome(folder, config)
        try:
            with assembled(loaded, folder=folder, attempt=attempt, recorder=recorder, stop=stop) as parts:
                recorder.emit(Notice(text=header(config, parts, device)))
                state = sync.run(parts, steps=config.steps)
                outcome.steps, outcome.finished = state.step, True
                outcome.export = exported(config, folder, parts, recorder)
        finally:
            recorder.close()
            summary = outcome.write()
        return {**summary, "already_finished": False}


class _Outcome:
    """What is known of the run when it ends, well or not."""

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        self.folder, self.config = folder, config
        self.began = time.monotonic()
        self.steps = 0
        self.finished = False
        self.export: Path | None = None

    def write(self) -> dict[str, Any]:
        """summary.json and the page."""
        seconds = time.monotonic() - self.began
        summary = summarize(
            self.folder.root, steps=self.steps, seconds=seconds, finished=self.finished, export=self.export
        )
        self.folder.write_summary(summary)
        write_report(self.folder.root)
        return summary


def with_origins(loaded: Loaded) -> dict[str, Any]:
    """Each setting's path with its value and origin, as manifest.json holds them."""
    found: dict[str, Any] = {}
    for path, origin in loaded.origins.items():
        value: Any = loaded.config.to_json()
        for name in path.split("."):
            value = value[name]
        found[path] = {"value": value, "origin": origin}
    return found


def header(config: RunConfig, parts: Parts, device: str) -> str:
    """What runs, in a sentence."""
    trainer, engine = parts.trainer.footprint(Part.ALL), parts.engine.footprint(Part.ALL)
    return (
        f"{config.model.name} on {device}: {config.steps} steps, trainer {format_bytes(trainer)}, "
        f"engine {format_bytes(engine)}, run folder {config.run.dir}"
    )


def exported(config: RunConfig, folder: RunFolder, parts: Parts, recorder: Recorder) -> Path | None:
    """The trained model as a Hugging Face folder, written from the trainer's host copy."""
    if not config.checkpoint.export:
        return None
    target = folder.export / f"step-{config.steps:08d}"
    if target.exists():
        return target
    with parts.residency.awake(parts.trainer):
        snapshot = parts.trainer.snapshot()
    try:
        prefix = "model/"
        weights: Mapping[str, Any] = {
            name.removeprefix(prefix): tensor for name, tensor in snapshot.tensors.items() if name.startswith(prefix)
        }
        return export_model(
            weights=weights,
            base=config.model,
            target=target,
            dtype=config.checkpoint.export_dtype,
            emit=recorder.emit,
        )
    finally:
        snapshot.release()
