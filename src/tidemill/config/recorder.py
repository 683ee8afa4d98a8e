"""Where what happens is shown and kept, besides the JSONL files, which are always written."""

from typing import ClassVar, Literal

from tidemill.config.base import Settings
from tidemill.config.kinds import Names

__all__ = ["RecorderSettings", "RichSettings", "SinkSettings", "TensorboardSettings", "WandbSettings"]


class SinkSettings(Settings):
    """One place that events go to. A plug-in subclasses this; `recorder.use` names it."""

    implementation: ClassVar[str] = ""
    requires: ClassVar[tuple[str, ...]] = ()
    """Libraries outside Tidemill's own dependencies, by the names that they are imported by."""
    extra: ClassVar[str] = ""
    """The extra of Tidemill that installs them; empty when another package brings the plug-in."""


class RichSettings(SinkSettings):
    """The console: progress, and one line a step."""

    implementation: ClassVar[str] = "tidemill.recorders.rich:RichSink"


class TensorboardSettings(SinkSettings):
    """TensorBoard files in `tensorboard/` of the run folder."""

    implementation: ClassVar[str] = "tidemill.recorders.tensorboard:TensorboardSink"
    requires: ClassVar[tuple[str, ...]] = ("tensorboard",)
    extra: ClassVar[str] = "tensorboard"


class WandbSettings(SinkSettings):
    """Weights & Biases. Its key comes from its own login or the environment, never from settings."""

    implementation: ClassVar[str] = "tidemill.recorders.wandb:WandbSink"
    requires: ClassVar[tuple[str, ...]] = ("wandb",)
    extra: ClassVar[str] = "wandb"

    project: str = "tidemill"
    """Project that the run appears in."""
    entity: str = ""
    """User or team that owns the project; empty for the one that is logged in."""
    name: str = ""
    """Name of the run; empty for the name of the run folder."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to the run folder only, to be uploaded later with `wandb sync`."""


class RecorderSettings(Settings):
    """Recorders."""

    use: Names = ("rich",)
    """Recorders: `rich`, `tensorboard`, `wandb`, entry points in `tidemill.recorders`, or `module:Class` of settings
    classes. An empty list records to the JSONL files only."""
    wandb: WandbSettings = WandbSettings()
    """How Weights & Biases is used, when `recorder.use` names it."""
