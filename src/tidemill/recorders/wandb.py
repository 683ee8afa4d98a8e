"""Scalars for Weights & Biases under one run id, over crash and resume, with an account or offline.

W&B's own step counter only rises, so the training step is a column of its own and the x axis of every curve. What a
crash recorded beyond the checkpoint cannot be taken back there: `start` counts the starts, so that a reader can tell.
"""

import importlib
import json
import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidemill.contracts.events import Evaluated, Event, Metrics
from tidemill.errors import PluginError

__all__ = ["WandbSink"]


class WandbSink:
    """Implements `Sink`. `mode` is W&B's: `online`, `offline` or `disabled`; everything lies in `folder`/wandb."""

    name = "wandb"

    def __init__(
        self,
        *,
        folder: Path,
        mode: str = "online",
        project: str = "tidemill",
        entity: str = "",
        title: str = "",
        settings: Mapping[str, Any],
    ) -> None:
        """`title` is the name shown; `settings` are shown as the run's configuration. Raises PluginError."""
        try:
            self._library: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise PluginError(
                f"cannot record to wandb: the library is not installed ({error}); "
                f"run pip install 'tidemill[wandb]' or leave it out of recorder.use"
            ) from error
        self._folder, self._mode, self._project = folder, mode, project
        self._entity, self._title = entity, title
        self._settings = dict(settings)
        self._id = ""
        self._start = 0
        self._runs: list[Any] = []

    def resume(self, step: int, state: Mapping[str, Any]) -> None:
        """Open the run with the id of the checkpoint, or of an earlier start in this folder, or a new one."""
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        note = self._folder / "wandb-run.json"
        earlier = json.loads(note.read_text()) if note.is_file() else {}
        self._id = str(state.get("id") or earlier.get("id") or secrets.token_hex(4))
        self._start = int(earlier.get("start", 0)) + 1
        note.with_suffix(".new").write_text(json.dumps({"id": self._id, "start": self._start}))
        note.with_suffix(".new").replace(note)
        run = self._library.init(
            id=self._id,
            resume="allow",
            mode=self._mode,
            project=self._project,
            entity=self._entity or None,
            name=self._title or None,
            dir=str(self._folder),
            config=self._settings,
            settings=self._quiet(),
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        self._runs.append(run)

    def write(self, step: int, event: Event) -> None:
        """Log a row at once: what waits for the end of the step would be lost when the run is killed before it."""
        if isinstance(event, (Metrics, Evaluated)):
            values = {name: float(value) for name, value in event.values.items() if math.isfinite(value)}
            self._runs[0].log({**values, "step": step, "start": self._start})

    def flush(self) -> None:
        """Nothing: its own process writes."""

    def end_step(self, step: int) -> None:
        """Nothing: rows are logged at once."""

    def state(self) -> Mapping[str, Any]:
        """The run's id. A process of W&B's own holds and writes the rows, and outlives this one."""
        return {"id": self._id}

    def close(self) -> None:
        """Finish the run; it can be resumed."""
        while self._runs:
            self._runs.pop().finish()

    def _quiet(self) -> Any:
        """No output, and nothing sent about this machine, its packages, its code or the command line."""
        return self._library.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            save_code=False,
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
        )
