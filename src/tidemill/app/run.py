"""One start of a run, from its settings to its summary."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tidemill.app import export
from tidemill.app.assemble import assembled
from tidemill.app.build import build_cluster
from tidemill.app.identity import run_identity
from tidemill.app.recording import build_recorder
from tidemill.app.run_folder import RunFolder
from tidemill.app.signals import Signals
from tidemill.app.summary import as_it_lies, is_finished, summarize
from tidemill.checkpoint.attempts import next_attempt
from tidemill.checkpoint.identity import check_newest
from tidemill.checkpoint.lock import RunLock
from tidemill.config.load import Loaded
from tidemill.config.run import RunConfig
from tidemill.contracts.events import Notice
from tidemill.contracts.footprint import Part
from tidemill.contracts.parts import Parts
from tidemill.errors import ConfigError, TidemillError
from tidemill.loops import sync
from tidemill.planning.machine import this_machine
from tidemill.planning.plan import plan_of
from tidemill.recorders.page.source import read_json
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
        earlier = as_it_lies(read_json(folder.summary), folder.export)
        if is_finished(earlier, steps=config.steps, export=config.checkpoint.export):
            check_newest(folder.checkpoints, run_identity(config), accept=config.checkpoint.accept)
            told(folder, earlier)  # the start that finished may have died before its page was written
            return {**earlier, "already_finished": True}
        attempt = next_attempt(folder.root)
        settings = with_origins(loaded)
        recorder = build_recorder(config, folder, quiet=quiet, settings=settings)
        outcome = _Outcome(folder, config)
        try:
            with contextlib.closing(build_cluster(config, recorder.emit)) as cluster:
                folder.write_manifest(settings=settings, attempt=attempt, command=command, device=cluster.device)
                folder.write_plan(planned(config, cluster.device))
                made = assembled(loaded, cluster, folder=folder, attempt=attempt, recorder=recorder, stop=stop)
                with made as parts:
                    recorder.emit(Notice(text=header(config, parts, cluster.device)))
                    _train(config, folder, parts, outcome)
            recorder.close()  # what it told last is durable then, or the run has not finished
            recorder.check()
        except BaseException as error:
            recorder.close()
            outcome.write_after(error)
            raise
        outcome.finished = True
        return {**outcome.write(), "already_finished": False}


def _train(config: RunConfig, folder: RunFolder, parts: Parts, outcome: "_Outcome") -> None:
    state = sync.run(parts, steps=config.steps)
    outcome.steps = state.step
    if state.step > config.steps:
        parts.recorder.emit(Notice(text=past_the_end(state.step, config.steps), level="warning"))
    outcome.export = export.exported(config, folder, parts, step=state.step)


class _Outcome:
    """What is known of the run when it ends, well or not."""

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        self.folder, self.config = folder, config
        self.began = time.monotonic()
        self.steps = 0
        self.finished = False
        self.export: Path | None = None

    def write(self) -> dict[str, Any]:
        """summary.json and the page. Raises TidemillError when they cannot be written."""
        seconds = time.monotonic() - self.began
        summary = summarize(
            self.folder.root, steps=self.steps, seconds=seconds, finished=self.finished, export=self.export
        )
        told(self.folder, summary)
        return summary

    def write_after(self, error: BaseException) -> None:
        """As `write`, for a run that `error` ended: that is what will be told, whatever else goes wrong here."""
        try:
            self.write()
        except Exception as second:
            error.add_note(f"and then: {second}")


def told(folder: RunFolder, summary: Mapping[str, Any]) -> None:
    """Write `summary` and the page, which shows it. Raises TidemillError when the disk does not take them."""
    try:
        folder.write_summary(summary)
        write_report(folder.root)
    except OSError as error:
        raise TidemillError(
            f"cannot write the summary and the page of the run to {folder.root}: {error}; what was saved is safe: free "
            f"the disk or make the folder writable, and start the same command again"
        ) from error


def planned(config: RunConfig, device: str) -> dict[str, Any]:
    """What the run is planned to take on `device`; empty for parts that nobody can plan for."""
    try:
        return plan_of(config, this_machine(device=device)).to_json()
    except ConfigError:
        return {}


def with_origins(loaded: Loaded) -> dict[str, Any]:
    """Each setting's path with its value and origin, as manifest.json holds them."""
    found: dict[str, Any] = {}
    for path, origin in loaded.origins.items():
        value: Any = loaded.config.to_json()
        for name in path.split("."):
            value = value[name]
        found[path] = {"value": value, "origin": origin}
    return found


def past_the_end(step: int, steps: int) -> str:
    """What a run says that has less to do than it has done."""
    return f"the checkpoint is at step {step}, past steps = {steps}: nothing is left to train"


def header(config: RunConfig, parts: Parts, device: str) -> str:
    """What runs, in a sentence."""
    trainer, engine = parts.trainer.footprint(Part.ALL), parts.engine.footprint(Part.ALL)
    return (
        f"{config.model.name} on {device}: {config.steps} steps, trainer {format_bytes(trainer)}, "
        f"engine {format_bytes(engine)}, run folder {config.run.dir}"
    )
