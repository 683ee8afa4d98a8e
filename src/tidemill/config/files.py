"""What settings name outside themselves: model, data and reward files that must be there, and installed libraries.

Plain looks at the disk; no model or data library is imported. `CHECKS` hold for every use of settings,
`TRAINING_CHECKS` for a run that trains.
"""

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

from tidemill.config.findings import Finding, Rule
from tidemill.config.registry import missing_libraries, sinks
from tidemill.config.reward import FunctionRewardSettings
from tidemill.config.run import RunConfig
from tidemill.config.tokenizer_files import holds_a_tokenizer, tokenizer_kinds_in_words

__all__ = ["CHECKS", "TRAINING_CHECKS"]


_TEMPLATES = ("chat_template.jinja", "chat_template.json", "chat_templates")


def _exists(path: Path) -> bool:
    """Also false where the path cannot be looked at."""
    try:
        return path.exists()
    except OSError:
        return False


def _is_dir(path: Path) -> bool:
    return _exists(path) and path.is_dir()


def _is_file(path: Path) -> bool:
    return _exists(path) and path.is_file()


def the_model_folder_is_whole(config: RunConfig) -> Iterator[Finding]:
    """Config and tokenizer are there; weights are read, and refused, when the model is loaded."""
    model = config.model
    if not _is_dir(model):
        what = "is not a folder" if _exists(model) else "there is no such folder"
        yield Finding(
            ("model",),
            f"{what}; name a local folder in the Hugging Face layout (`tidemill model import` makes one)",
        )
        return
    if problem := _bad_json(model / "config.json"):
        yield Finding(("model",), problem)
    if not holds_a_tokenizer(model):
        yield Finding(("model",), f"has no tokenizer: it holds none of {tokenizer_kinds_in_words()}")
    if _exists(model / "tokenizer_config.json") and (problem := _bad_json(model / "tokenizer_config.json")):
        yield Finding(("model",), problem)
    if config.data.chat == "template" and not _has_template(model):
        yield Finding(
            ("data.chat", "model"), f'the tokenizer in {model} has no chat template; set it to "plain", or add one'
        )


def _bad_json(path: Path) -> str:
    # Nobody writes into a pipe that lies there, and reading it would never end.
    if _exists(path) and not path.is_file():
        return f"its {path.name} is not a file"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"has no {path.name}"
    except (OSError, ValueError, RecursionError) as error:
        return f"its {path.name} cannot be read: {error}"
    return "" if isinstance(found, dict) else f"its {path.name} is not a JSON object"


def _has_template(model: Path) -> bool:
    if any(_exists(model / name) for name in _TEMPLATES):
        return True
    path = model / "tokenizer_config.json"
    return not _bad_json(path) and "chat_template" in json.loads(path.read_text(encoding="utf-8"))


def prompts_are_a_file(config: RunConfig) -> Iterator[Finding]:
    """The data."""
    yield from _file("data.prompts", config.data.prompts)


def evaluation_prompts_are_a_file(config: RunConfig) -> Iterator[Finding]:
    """The held-out data."""
    if config.eval.data is not None:
        yield from _file("eval.data", config.eval.data)


def demonstrations_are_a_file(config: RunConfig) -> Iterator[Finding]:
    """The supervised data."""
    if config.warm_up.data is not None:
        yield from _file("warm_up.data", config.warm_up.data)


def _file(name: str, path: Path) -> Iterator[Finding]:
    if _is_dir(path):
        yield Finding((name,), "is a folder; name a file")
    elif not _is_file(path):
        yield Finding((name,), "there is no such file")
    elif not os.access(path, os.R_OK):
        yield Finding((name,), "may not be read; change its permissions")


def replayed_rollouts_are_there(config: RunConfig) -> Iterator[Finding]:
    """A folder of dumped rollouts; never a fresh start in silence."""
    replay = config.rollout.replay
    if replay is not None and not _is_dir(replay):
        yield Finding(("rollout.replay",), "there is no such folder of dumped rollouts")
    elif replay is not None and next(replay.glob("step-*.jsonl"), None) is None:
        yield Finding(
            ("rollout.replay",), "holds no step-*.jsonl; name the folder `rollouts` of a run with rollout.dump = true"
        )


def the_run_folder_can_be_made(config: RunConfig) -> Iterator[Finding]:
    """Found before anything is started."""
    nearest = next(path for path in (config.run.dir, *config.run.dir.parents) if _exists(path))
    if not _is_dir(nearest):
        yield Finding(("run.dir",), f"cannot be a folder: {nearest} is a file")
    elif not os.access(nearest, os.W_OK | os.X_OK):
        yield Finding(("run.dir",), f"cannot be written: {nearest} is read-only; choose another folder")


def a_reward_function_is_there(config: RunConfig) -> Iterator[Finding]:
    """The file or the package of the user's function; its code runs in the reward's process only."""
    if not isinstance(config.reward, FunctionRewardSettings):
        return
    place, _, _ = config.reward.use.rpartition(":")
    if place.endswith(".py"):
        yield from _file("reward.use", Path(place))
    elif not _importable(place.partition(".")[0]) and not _beside(place):
        yield Finding(("reward.use",), f"there is no module {place}; name a .py file, or install its package")


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:
        return False


def _beside(module: str) -> bool:
    """Whether the module lies in the present folder, where the reward's process looks too."""
    top = Path.cwd() / module.partition(".")[0]
    return top.is_dir() or top.with_suffix(".py").is_file()


def libraries_are_installed(config: RunConfig) -> Iterator[Finding]:
    """Only looked for, not imported."""
    for name in ("trainer", "engine", "algorithm", "data", "reward", "environment", "cluster"):
        if missing := missing_libraries(getattr(config, name)):
            yield Finding((f"{name}.use",), missing)
    for use, sink in sinks(config.recorder).items():
        if missing := missing_libraries(sink):
            yield Finding(("recorder.use",), f'"{use}" {missing}')


CHECKS: tuple[Rule, ...] = (
    the_model_folder_is_whole,
    prompts_are_a_file,
    a_reward_function_is_there,
    libraries_are_installed,
)
TRAINING_CHECKS: tuple[Rule, ...] = (
    *CHECKS,
    evaluation_prompts_are_a_file,
    demonstrations_are_a_file,
    replayed_rollouts_are_there,
    the_run_folder_can_be_made,
)
