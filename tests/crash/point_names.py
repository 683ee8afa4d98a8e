"""The names of all fault points of the program, read from its source: what a test of kills must know of."""

import ast
from collections.abc import Iterator
from pathlib import Path

import tidemill
from tidemill.cluster.engine_service import EngineService
from tidemill.cluster.trainer_service import TrainerService

_SOURCE = Path(tidemill.__file__).parent


def point_names() -> set[str]:
    """Of everything but what is for tests; a method that a worker is asked for is the point `worker.<method>`."""
    functions = [node for tree in _trees() for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    calls = [node for tree in _trees() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = {text for call in calls for text in _named(call)}
    suffixes = _suffixes(functions)
    prefixes = {(_called(call), text) for call in calls for text in _texts(call, ("faults",))}
    prefixes |= {(function.name, text) for function in functions for text in _default(function)}
    return named | {prefix + end for name, prefix in prefixes for end in suffixes[name]} | _asked()


def skip_names() -> set[str]:
    """Of the steps that a test may leave out, those that are no points too."""
    calls = [node for tree in _trees() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {call.args[0] for call in calls if _called(call) == "skipped"}
    return {str(name.value) for name in names if isinstance(name, ast.Constant)} - point_names()


def _trees() -> Iterator[ast.Module]:
    for path in sorted(_SOURCE.rglob("*.py")):
        if "testing" not in path.relative_to(_SOURCE).parts:
            yield ast.parse(path.read_text())


def _called(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _named(call: ast.Call) -> Iterator[str]:
    yield from _texts(call, ("fault", "fsync_fault"))
    if _called(call) == "point":
        (name,) = call.args
        if isinstance(name, ast.Constant):
            yield str(name.value)
        else:
            known = {"f'{faults}.", "f'worker.{method}'", "fault", "fsync_fault"}
            assert any(ast.unparse(name).startswith(start) for start in known), ast.unparse(name)


def _texts(call: ast.Call, words: tuple[str, ...]) -> Iterator[str]:
    for word in call.keywords:
        if word.arg in words and isinstance(word.value, ast.Constant):
            yield str(word.value.value)


def _default(function: ast.FunctionDef) -> Iterator[str]:
    last = function.args.args[len(function.args.args) - len(function.args.defaults) :]
    for argument, value in zip(last, function.args.defaults, strict=True):
        if argument.arg == "faults" and isinstance(value, ast.Constant):
            yield str(value.value)


def _suffixes(functions: list[ast.FunctionDef]) -> dict[str, set[str]]:
    """By function what it puts behind its `faults`, itself or through those that it hands them to."""
    found: dict[str, set[str]] = {function.name: set() for function in functions}
    handed: set[tuple[str, str]] = set()
    for function in functions:
        for node in ast.walk(function):
            match node:
                case ast.JoinedStr(values=[ast.FormattedValue(value=ast.Name(id="faults")), ast.Constant(value=end)]):
                    found[function.name].add(str(end))
                case ast.Call(keywords=words) if any(ast.unparse(word) == "faults=faults" for word in words):
                    handed.add((function.name, _called(node)))
    for _ in handed:
        for giver, taker in handed:
            found[giver] |= found[taker]
    return found


def _asked() -> set[str]:
    services = (TrainerService, EngineService)
    names = {name for service in services for name in dir(service) if not name.startswith("_")}
    return {f"worker.{name}" for name in names - {"use", "shift"}}
