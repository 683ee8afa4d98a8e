"""Which versions a process runs, and whether all processes of a run agree."""

import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

__all__ = ["disagreement", "versions"]

_LIBRARIES = ("tidemill", "torch", "transformers", "numpy")


def versions() -> dict[str, str]:
    """Versions that must be equal on all hosts, by name; builds for other devices (`+cpu`) count as equal.

    TIDEMILL_VERSIONS="torch=9.9,python=3.15" replaces some, so that tests can have a host that differs.
    """
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in _LIBRARIES:
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            found[name] = "none"
    told = os.environ.get("TIDEMILL_VERSIONS", "")
    return found | dict(word.split("=", 1) for word in told.split(",") if "=" in word)


def disagreement(driver: tuple[str, Mapping[str, str]], workers: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    """In words, which worker's host differs from the driver's, and in what; empty when none does. (host, versions)."""
    name, mine = driver
    told: list[str] = []
    for host, theirs in workers:
        differing = [library for library in mine if theirs.get(library) != mine[library]]
        if not differing:
            continue
        have = ", ".join(f"{library} {theirs.get(library, 'none')}" for library in differing)
        wanted = ", ".join(f"{library} {mine[library]}" for library in differing)
        words = f"{host} has {have}, and {name}, the driver's host, has {wanted}"
        told += [] if words in told else [words]
    return "; ".join(told)
