"""The recorder of a run: JSONL files always, then what `recorder.use` names."""

import sys
from collections.abc import Mapping
from typing import Any

from tidemill.app.build import train_sampling
from tidemill.app.run_folder import RunFolder
from tidemill.config.recorder import RichSettings, SinkSettings, TensorboardSettings, WandbSettings
from tidemill.config.registry import implementation, sinks
from tidemill.config.run import RunConfig
from tidemill.contracts.recorder import Sink
from tidemill.recorders.attention import AttentionSink
from tidemill.recorders.dump import DumpSink
from tidemill.recorders.fanout import Fanout
from tidemill.recorders.jsonl import JsonlSink

__all__ = ["build_recorder"]


def build_recorder(config: RunConfig, folder: RunFolder, *, quiet: bool, settings: Mapping[str, Any]) -> Fanout:
    """Every sink, open. `quiet` leaves warnings alone of the console. Raises PluginError when a library is missing."""
    essential: list[Sink] = [JsonlSink(run=folder.root)]
    kept: list[Sink] = []
    live: list[Sink] = []
    if config.rollout.dump:
        essential.append(DumpSink(folder=folder.rollouts, sampling=train_sampling(config)))
    for chosen in sinks(config.recorder).values():
        if isinstance(chosen, RichSettings):
            # Python has no stderr when it was started with that descriptor closed.
            if sys.stderr is not None and not sys.stderr.closed:
                live.append(AttentionSink(sys.stderr) if quiet else _console(chosen, config))
        else:
            kept.append(_sink(chosen, folder, settings))
    return Fanout(sinks=kept, live=live, essential=essential)


def _console(chosen: RichSettings, config: RunConfig) -> Sink:
    make = implementation(chosen)
    sink: Sink = make(steps=config.steps, warm_up_steps=config.warm_up.steps, stream=sys.stderr)
    return sink


def _sink(chosen: SinkSettings, folder: RunFolder, settings: Mapping[str, Any]) -> Sink:
    make = implementation(chosen)
    sink: Sink
    if isinstance(chosen, TensorboardSettings):
        sink = make(folder=folder.root / "tensorboard")
    elif isinstance(chosen, WandbSettings):
        sink = make(
            folder=folder.root / "wandb",
            mode=chosen.mode,
            project=chosen.project,
            entity=chosen.entity,
            title=chosen.name or folder.root.name,
            settings=settings,
        )
    else:
        own = {name: getattr(chosen, name) for name in type(chosen).model_fields}
        sink = make(folder=folder.root, **own)
    return sink
