"""tidemill.config.registry: from names to settings classes, and from settings to implementations."""

import importlib
import sys
import textwrap
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic_core import PydanticCustomError

from tidemill.config import registry
from tidemill.config.cluster import RayClusterSettings
from tidemill.config.engine import EngineSettings
from tidemill.config.load import Loaded, SettingsError
from tidemill.config.recorder import RecorderSettings, SinkSettings, WandbSettings
from tidemill.config.registry import SEAMS, implementation, missing_libraries, resolve, sinks
from tidemill.config.reward import FunctionRewardSettings
from tidemill.errors import PluginError

Load = Callable[..., Loaded]


class AcmeEngine(EngineSettings):
    """What an entry point of another package would give."""

    implementation: ClassVar[str] = "collections:OrderedDict"
    requires: ClassVar[tuple[str, ...]] = ("a_library_that_nobody_has",)
    speed: int = 3


class Bell(SinkSettings):
    """A recorder of another package."""

    implementation: ClassVar[str] = "collections:Counter"


@pytest.fixture
def acme(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint(name="acme", value=f"{__name__}:AcmeEngine", group="tidemill.engines"),
        EntryPoint(name="bell", value=f"{__name__}:Bell", group="tidemill.recorders"),
        EntryPoint(name="broken", value="no_such_package:X", group="tidemill.engines"),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: [point for point in points if point.group == group])
    for seam in SEAMS.values():
        seam.found.clear()


@pytest.mark.parametrize("seam", SEAMS.values(), ids=SEAMS)
def test_there_are_eight_seams_and_each_has_a_group_of_entry_points(seam: registry.Seam) -> None:
    assert len(SEAMS) == 8
    assert seam.group.startswith(f"tidemill.{seam.name}")
    for use in seam.builtin:
        assert issubclass(resolve(seam, use), seam.parent)


def test_an_entry_point_is_found_by_its_name(acme: None, loaded: Load) -> None:
    config = loaded("engine.use=acme", "engine.speed=4", check_files=False).config
    assert config.engine == AcmeEngine(use="acme", speed=4)


def test_a_settings_class_is_found_by_module_and_name(loaded: Load) -> None:
    config = loaded(f"engine.use={__name__}:AcmeEngine", check_files=False).config
    assert type(config.engine).__name__ == "AcmeEngine" and config.engine.use == f"{__name__}:AcmeEngine"
    assert type(config).from_json(config.to_json()) == config


def test_an_unknown_name_is_answered_with_the_known_ones_and_the_nearest(acme: None, loaded: Load) -> None:
    with pytest.raises(SettingsError) as caught:
        loaded("engine.use=transformer")
    (problem,) = caught.value.problems
    assert str(problem) == (
        'engine.use = "transformer" (command line): no such engine; known are '
        f"{', '.join(SEAMS['engine'].builtin)}, acme, broken, "
        "or module:Class of a settings class; did you mean transformers?"
    )


@pytest.mark.parametrize(
    ("use", "reason"),
    [
        ("no_such_module:X", "cannot be imported: ModuleNotFoundError"),
        ("json:NoSuchName", "cannot be imported: AttributeError"),
        ("json:JSONDecoder", "is not the settings class of a engine"),
        ("broken", "no_such_package:X cannot be imported"),
        (":", "cannot be imported"),
    ],
)
def test_a_plug_in_that_cannot_be_used_is_a_problem_of_the_settings(
    acme: None, loaded: Load, use: str, reason: str
) -> None:
    with pytest.raises(SettingsError, match=rf"engine\.use.*{reason}"):
        loaded(f"engine.use={use}")


def test_a_plug_in_that_raises_while_imported_is_a_problem_of_the_settings(
    loaded: Load, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "raises_at_import.py").write_text("raise RuntimeError('not today')\n")
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(SettingsError, match="RuntimeError: not today"):
        loaded("engine.use=raises_at_import:X")


@pytest.mark.parametrize("use", ["a_lab.rewards:score", "lab/score.py:score"])
def test_a_reward_function_is_not_imported_here(loaded: Load, folder: Path, use: str) -> None:
    for name in ("a_lab/rewards.py", "lab/score.py"):
        (folder / name).parent.mkdir()
        (folder / name).write_text(textwrap.dedent("raise SystemExit('imported in the wrong process')"))
    config = loaded(f"reward.use={use}", "reward.timeout=3").config
    assert isinstance(config.reward, FunctionRewardSettings)
    assert "a_lab" not in sys.modules
    expected = use if use.startswith("a_lab") else f"{folder}/lab/score.py:score"
    assert config.reward.use == expected and config.reward.timeout == 3


@pytest.mark.parametrize(
    "use", ["lab/score.py", "gone.py:score", "a_module_that_is_not_there:score", "x.py:not a name"]
)
def test_a_reward_function_that_is_not_there_is_a_problem(loaded: Load, use: str) -> None:
    with pytest.raises(SettingsError, match=r"reward\.use"):
        loaded(f"reward.use={use}")


def test_recorders_are_resolved_in_order_with_their_settings(acme: None) -> None:
    chosen = sinks(RecorderSettings(use=("bell", "wandb", "rich"), wandb=WandbSettings(project="mine")))
    assert list(chosen) == ["bell", "wandb", "rich"]
    assert chosen["wandb"] == WandbSettings(project="mine")
    assert isinstance(chosen["bell"], Bell)
    with pytest.raises(PydanticCustomError, match="did you mean rich"):
        sinks(RecorderSettings(use=("richh",)))


def test_an_unknown_recorder_is_a_problem_of_the_settings(loaded: Load) -> None:
    with pytest.raises(SettingsError, match=r'"tensorbord": no such recorder; .* did you mean tensorboard\?'):
        loaded('recorder.use=["rich", "tensorbord"]')
    with pytest.raises(SettingsError, match="names rich more than once"):
        loaded('recorder.use=["rich", "rich"]')


def test_a_missing_library_is_answered_with_the_install_command(loaded: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WandbSettings, "requires", ("a_library_that_nobody_has",))
    assert missing_libraries(WandbSettings()).endswith("which is not installed; pip install 'tidemill[wandb]'")
    monkeypatch.setattr(RayClusterSettings, "requires", ("a_library_that_nobody_has",))
    with pytest.raises(SettingsError, match=r"cluster\.use.*pip install 'tidemill\[ray\]'"):
        loaded("cluster.use=ray")
    with pytest.raises(PluginError, match=r"cannot build wandb: .*pip install 'tidemill\[wandb\]'"):
        implementation(WandbSettings())
    with pytest.raises(SettingsError, match=r"recorder\.use.*pip install 'tidemill\[wandb\]'"):
        loaded('recorder.use=["wandb"]')
    with pytest.raises(SettingsError, match=r"engine\.use.*pip install a_library_that_nobody_has"):
        loaded(f"engine.use={__name__}:AcmeEngine")


def test_an_implementation_is_imported_when_built() -> None:
    from collections import Counter

    assert implementation(Bell()) is Counter
    with pytest.raises(PluginError, match="cannot build acme"):
        implementation(AcmeEngine(use="acme"))
    with pytest.raises(PluginError, match=r"its implementation, which is not named"):
        implementation(EngineSettings(use="nothing"))


def test_every_built_in_names_an_implementation_that_exists() -> None:
    for seam in SEAMS.values():
        for settings in [*seam.builtin.values(), *([seam.function] if seam.function else [])]:
            module, _, name = settings.__dict__["implementation"].partition(":")
            assert hasattr(importlib.import_module(module), name), settings
