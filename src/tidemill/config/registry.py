"""From a name in `use` to a settings class, and from settings to what they are implemented by.

Built-in names come first, then entry points, then `module:Class` of a settings class. A reward with a colon is a
function of the user's: it is kept as text, and only the reward's own process imports it. Implementations are imported
by `implementation`, when a run is built, and never before.
"""

import difflib
import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import entry_points
from typing import Any

from pydantic import GetCoreSchemaHandler, ValidationError, ValidationInfo
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from tidemill.config.algorithm import AlgorithmSettings, GrpoSettings
from tidemill.config.base import Plug, Settings
from tidemill.config.cluster import ClusterSettings, InlineClusterSettings, RayClusterSettings
from tidemill.config.data import DataSettings, JsonlDataSettings
from tidemill.config.engine import EngineSettings, TransformersEngineSettings, VllmEngineSettings
from tidemill.config.engine_remote import RemoteEngineSettings, SglangEngineSettings
from tidemill.config.environment import EnvironmentSettings, SingleTurnSettings
from tidemill.config.kinds import refuse
from tidemill.config.recorder import RecorderSettings, RichSettings, SinkSettings, TensorboardSettings, WandbSettings
from tidemill.config.reward import ExactMatchSettings, FunctionRewardSettings, RegexSettings, RewardSettings
from tidemill.config.trainer import FsdpTrainerSettings, TrainerSettings
from tidemill.errors import PluginError

__all__ = ["SEAMS", "Plugged", "Seam", "implementation", "missing_libraries", "resolve", "sinks"]


@dataclass(frozen=True, kw_only=True)
class Seam:
    """One of the eight places where a plug-in goes. The first built-in is what `use` defaults to."""

    name: str
    group: str
    parent: type[Settings]
    builtin: Mapping[str, type[Settings]]
    function: type[Plug] | None = None
    found: dict[str, type[Settings]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def default(self) -> str:
        """The `use` of a section that names none."""
        return next(iter(self.builtin))


SEAMS: Mapping[str, Seam] = {
    seam.name: seam
    for seam in (
        Seam(name="trainer", group="tidemill.trainers", parent=TrainerSettings, builtin={"fsdp": FsdpTrainerSettings}),
        Seam(
            name="engine",
            group="tidemill.engines",
            parent=EngineSettings,
            builtin={
                "transformers": TransformersEngineSettings,
                "vllm": VllmEngineSettings,
                "sglang": SglangEngineSettings,
                "remote": RemoteEngineSettings,
            },
        ),
        Seam(name="algorithm", group="tidemill.algorithms", parent=AlgorithmSettings, builtin={"grpo": GrpoSettings}),
        Seam(name="data", group="tidemill.data", parent=DataSettings, builtin={"jsonl": JsonlDataSettings}),
        Seam(
            name="reward",
            group="tidemill.rewards",
            parent=RewardSettings,
            builtin={"exact_match": ExactMatchSettings, "regex": RegexSettings},
            function=FunctionRewardSettings,
        ),
        Seam(
            name="environment",
            group="tidemill.environments",
            parent=EnvironmentSettings,
            builtin={"single_turn": SingleTurnSettings},
        ),
        Seam(
            name="cluster",
            group="tidemill.clusters",
            parent=ClusterSettings,
            builtin={"inline": InlineClusterSettings, "ray": RayClusterSettings},
        ),
        Seam(
            name="recorder",
            group="tidemill.recorders",
            parent=SinkSettings,
            builtin={"rich": RichSettings, "tensorboard": TensorboardSettings, "wandb": WandbSettings},
        ),
    )
}


def resolve(seam: Seam, use: str) -> type[Settings]:
    """The settings class behind `use`. Raises PydanticCustomError, whose text says what is known."""
    if use in seam.builtin:
        return seam.builtin[use]
    if use in seam.found:
        return seam.found[use]
    if ":" in use and seam.function is not None:
        return seam.function
    seam.found[use] = _checked(seam, _imported(use) if ":" in use else _entry_point(seam, use))
    return seam.found[use]


def _imported(use: str) -> object:
    module, _, name = use.partition(":")
    try:
        found: object = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # a plug-in may raise anything; it is reported with the other problems
        raise refuse(f"cannot be imported: {type(error).__name__}: {error}") from error
    return found


def _entry_point(seam: Seam, use: str) -> object:
    points = {point.name: point for point in entry_points(group=seam.group)}
    if use not in points:
        known = [*seam.builtin, *sorted(points)]
        close = difflib.get_close_matches(use, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        forms = "module:function" if seam.function else "module:Class of a settings class"
        raise refuse(f"no such {seam.name}; known are {', '.join(known)}, or {forms}{hint}")
    try:
        return points[use].load()
    except Exception as error:  # as above
        raise refuse(f"{points[use].value} cannot be imported: {type(error).__name__}: {error}") from error


def _checked(seam: Seam, found: object) -> type[Settings]:
    if isinstance(found, type) and issubclass(found, seam.parent):
        return found
    parent = f"{seam.parent.__module__}.{seam.parent.__name__}"
    raise refuse(f"is not the settings class of a {seam.name}: it should be a subclass of {parent}")


@dataclass(frozen=True)
class Plugged:
    """Marks a field whose class depends on its `use`: `Annotated[EngineSettings, Plugged("engine")]`."""

    seam: str

    def __get_pydantic_core_schema__(self, source: type[Plug], handler: GetCoreSchemaHandler) -> CoreSchema:
        """Validation by the class that `use` names; the JSON schema is that of any built-in one."""
        seam = SEAMS[self.seam]
        classes = [*seam.builtin.values(), *([seam.function] if seam.function else [])]
        return core_schema.with_info_plain_validator_function(
            partial(_validated, seam),
            json_schema_input_schema=core_schema.union_schema([handler.generate_schema(each) for each in classes]),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda value: value.to_json()),
        )


def _validated(seam: Seam, value: Any, info: ValidationInfo) -> Settings:
    if isinstance(value, seam.parent):
        return value
    if not isinstance(value, dict):
        raise refuse("should be a table")
    use = value.get("use", seam.default)
    if not isinstance(use, str) or not use:
        raise _at_use(seam, refuse("should be a name, as text"), use)
    try:
        settings = resolve(seam, use)
    except PydanticCustomError as error:
        raise _at_use(seam, error, use) from error
    return settings.model_validate(value | {"use": use}, context=info.context)


def _at_use(seam: Seam, error: PydanticCustomError, use: object) -> ValidationError:
    details: list[InitErrorDetails] = [{"type": error, "loc": ("use",), "input": use}]
    return ValidationError.from_exception_data(seam.name, details)


def sinks(recorder: RecorderSettings) -> dict[str, SinkSettings]:
    """Settings of each recorder in `recorder.use`, by that name. Raises PydanticCustomError for an unknown one."""
    found: dict[str, SinkSettings] = {}
    for use in recorder.use:
        settings = resolve(SEAMS["recorder"], use)
        chosen = recorder.wandb if use == "wandb" else settings()
        if not isinstance(chosen, SinkSettings):
            raise TypeError(f"{settings} is no SinkSettings")
        found[use] = chosen
    return found


def missing_libraries(settings: Plug | SinkSettings) -> str:
    """What has to be installed first, as `needs wandb, ...: pip install ...`; empty when nothing. Imports nothing."""
    missing = [name for name in settings.requires if importlib.util.find_spec(name) is None]
    if not missing:
        return ""
    command = f"pip install 'tidemill[{settings.extra}]'" if settings.extra else f"pip install {' '.join(missing)}"
    return f"needs {', '.join(missing)}, which is not installed; {command}"


def implementation(settings: Plug | SinkSettings) -> Any:
    """The class or function that the settings name, imported now. Raises PluginError with the install command."""
    if missing := missing_libraries(settings):
        raise PluginError(f"cannot build {_named(settings)}: it {missing}")
    module, _, name = settings.implementation.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PluginError(
            f"cannot build {_named(settings)}: {settings.implementation or 'its implementation, which is not named,'} "
            f"cannot be imported ({error}); check the plug-in's `implementation` and install what it needs"
        ) from error


def _named(settings: Plug | SinkSettings) -> str:
    return settings.use if isinstance(settings, Plug) else type(settings).__name__.removesuffix("Settings").lower()
