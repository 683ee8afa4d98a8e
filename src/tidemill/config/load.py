"""From files and words to one RunConfig, or to all that is wrong with it at once.

TOML files first, then `path=value` words; later wins; tables merge, all else is replaced. Relative paths are read
against the folder in which the command was given, whatever file they stand in, and stored absolute.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from tidemill.config.base import Settings
from tidemill.config.fields import field_at, is_text, leaves, section_class
from tidemill.config.files import CHECKS, TRAINING_CHECKS
from tidemill.config.findings import Finding, Rule
from tidemill.config.merge import NOT_TOML, Setting, Tree, at, flatten, merged, plain, read_file, read_word
from tidemill.config.problems import Problem, dotted, problem_of, report
from tidemill.config.rules import RULES, TRAINING_RULES
from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError

__all__ = ["DEFAULT", "Loaded", "SettingsError", "load"]

DEFAULT = "default"
_ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A good config, and where each of its settings came from: a file as it was named, `command line`, `default`."""

    config: RunConfig
    origins: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Effective settings with origins, as JSON values."""
        return {"settings": self.config.to_json(), "origins": dict(self.origins)}


class SettingsError(ConfigError):
    """All problems of a run's settings, in one message and one by one."""

    problems: tuple[Problem, ...] = ()

    @classmethod
    def of(cls, problems: Sequence[Problem]) -> "SettingsError":
        """The error that reports these problems."""
        error = cls(report(problems))
        error.problems = tuple(problems)
        return error


def load(
    files: Sequence[Path],
    words: Sequence[str],
    *,
    check_files: bool = True,
    training: bool = True,
) -> Loaded:
    """The settings in `files`, then `words`.

    `check_files=False` leaves out every look at the disk beyond the files themselves. `training=False` is for uses that
    train nothing: rules about learning do not apply. Raises SettingsError with all problems, or ConfigError when a
    file or a word cannot be read at all.
    """
    tree = _read(files, words)
    values = _values(tree)
    problems, config, tainted = _validated(tree, values)
    rules: list[Rule] = [*(TRAINING_RULES if training else RULES)]
    found = list(_findings(rules, config, tainted))
    # Looking for libraries needs known recorders, so the disk comes after the rules.
    unknown = any(finding.paths[0] == "recorder.use" for finding in found)
    if check_files and not unknown:
        found += _findings([*(TRAINING_CHECKS if training else CHECKS)], config, tainted)
    problems += [_problem(finding, config, tree) for finding in found]
    if problems:
        raise SettingsError.of(problems)
    return Loaded(config=config, origins=dict(_origins(config, tree)))


def _read(files: Sequence[Path], words: Sequence[str]) -> Tree:
    tree: Tree = {}
    wrong: list[str] = []
    for reader, source in [*((read_file, file) for file in files), *((read_word, word) for word in words)]:
        try:
            tree = merged(tree, reader(source))  # type: ignore[operator]
        except ConfigError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError("\n".join(wrong))
    return tree


def _values(tree: Tree) -> dict[str, Any]:
    """Plain values, a table for every section, and each word read as its setting wants it."""
    values = plain(tree)
    for name, field in RunConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            values.setdefault(name, {})
    for path, setting in flatten(tree):
        field_info = field_at(RunConfig, values, path)
        if setting.word is None or field_info is None:
            continue
        if setting.value is NOT_TOML or isinstance(setting.value, str | list) or not is_text(field_info):
            continue
        # A number for a setting of text stays text.
        _put(values, path, setting.word.strip())
    return values


def _put(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        values = values.setdefault(name, {})
    values[path[-1]] = value


def _validated(tree: Tree, values: dict[str, Any]) -> tuple[list[Problem], RunConfig, set[str]]:
    """Problems of single settings; a config of what is right, with stand-ins; and the paths that are stand-ins."""
    context = {"folder": Path.cwd()}
    problems: list[Problem] = []
    tainted: set[str] = set()
    rest = copy.deepcopy(values)
    for _ in range(_ROUNDS):
        try:
            return problems, RunConfig.model_validate(rest, context=context), tainted
        except ValidationError as error:
            errors = error.errors(include_url=False)
        new = [each for each in errors if dotted(each["loc"]) not in tainted]
        problems += [problem_of(each, RunConfig, tree, values) for each in new] if not tainted else []
        tainted |= {dotted(each["loc"]) for each in errors}
        for each in errors:
            _stand_in(rest, each)
    raise SettingsError.of(problems)


def _stand_in(values: dict[str, Any], error: ErrorDetails) -> None:
    """Replace what is wrong by nothing, or by the field's example where nothing will not do."""
    path = tuple(part for part in error["loc"] if isinstance(part, str))
    field = field_at(RunConfig, values, path)
    if field is not None and section_class(field, {}) is not None:
        _put(values, path, {})
        return
    if field is not None and field.is_required() and field.examples:
        _put(values, path, field.examples[0])
        return
    for name in path[:-1]:
        values = values.get(name, {})
    values.pop(path[-1], None)


def _findings(rules: Sequence[Rule], config: RunConfig, tainted: set[str]) -> Iterator[Finding]:
    for rule in rules:
        for finding in rule(config):
            if not any(_touches(path, bad) for path in finding.paths for bad in tainted):
                yield finding


def _touches(path: str, bad: str) -> bool:
    return f"{path}.".startswith(f"{bad.partition('[')[0]}.") or f"{bad}.".startswith(f"{path}.")


def _problem(finding: Finding, config: RunConfig, tree: Tree) -> Problem:
    path = tuple(finding.paths[0].split("."))
    value: Any = config
    for name in path:
        value = getattr(value, name)
    found = at(tree, path)
    origin = found.origin if isinstance(found, Setting) else DEFAULT
    return Problem(path=finding.paths[0], text=finding.text, value=value, origin=origin)


def _origins(config: RunConfig, tree: Tree) -> Iterator[tuple[str, str]]:
    for leaf in leaves(RunConfig, config.to_json()):
        found = at(tree, leaf.path)
        yield dotted(leaf.path), found.origin if isinstance(found, Setting) else DEFAULT
