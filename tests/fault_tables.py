"""A table of faults and the tests that show them, as the kinds have one each."""

import ast
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

__all__ = ["check_all_listed", "check_shown"]

ROOT = Path(__file__).parents[1]

Table = Mapping[str, Sequence[str]]
"""Tests, as `path::name`, by the fault that they show."""


def functions_of(path: str) -> dict[str, str]:
    """Every test function of a file, with its docstring."""
    tree = ast.parse((ROOT / path).read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return {node.name: ast.get_docstring(node) or "" for node in found}


def check_shown(table: Table, fault: str) -> None:
    """Its tests exist, and one is named after it and says so."""
    shown = [node.split("::") for node in table[fault]]
    assert shown
    for path, name in shown:
        assert name in functions_of(path), f"{path} has no {name}"
    assert any(f"_{fault.lower()}_" in name and fault in functions_of(path)[name] for path, name in shown)


def check_all_listed(table: Table, faults: Iterable[str], files: Iterable[Path]) -> None:
    """The table has these faults and no other, and every test of these files."""
    assert set(table) == set(faults)
    listed = {node for nodes in table.values() for node in nodes}
    for file in files:
        path = str(file.relative_to(ROOT))
        named = {f"{path}::{name}" for name in functions_of(path)}
        assert named <= listed, named - listed
