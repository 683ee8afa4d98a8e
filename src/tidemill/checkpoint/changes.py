"""Which settings and libraries differ between two starts of a run: allowed, but never without a word."""

from collections.abc import Iterator, Mapping
from typing import Any

from tidemill.checkpoint.manifest import Manifest, library_versions

__all__ = ["changed_settings", "changes_since", "leaves"]

_MISSING = "not set"


def changed_settings(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`path: was -> is` of each setting that differs, in order of the paths. Tables are compared value by value."""
    before, after = dict(leaves(saved)), dict(leaves(now))
    return [
        f"{path}: {_shown(before.get(path, _MISSING))} -> {_shown(after.get(path, _MISSING))}"
        for path in sorted({*before, *after})
        if before.get(path, _MISSING) != after.get(path, _MISSING)
    ]


def changes_since(saved: Manifest, settings: Mapping[str, Any]) -> Iterator[str]:
    """What to say of a start under `settings` that goes on from `saved`; nothing where all is as it was."""
    changed = changed_settings(saved.settings.get("settings", {}), settings.get("settings", {}))
    if changed:
        yield f"settings changed since then: {'; '.join(changed)}"
    other = changed_settings(saved.versions, library_versions())
    if other:
        yield f"versions changed since then: {'; '.join(other)}: numbers may differ a little from here on"


def _shown(value: Any) -> Any:
    return '""' if value == "" else value


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Path and value of everything in nested tables that is no table itself."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
