"""Which versions a process runs, and whether all processes of a run agree."""

import functools
import importlib.util
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import xxhash

__all__ = ["disagreement", "hash_of_sources", "versions"]

_LIBRARIES = ("tidemill", "torch", "transformers", "numpy")
# What computes. A driver does not, and its host may have no GPU.
_OF_WORKERS = ("torch build", "CUDA of torch", "NCCL")
_PACKAGE = Path(__file__).parents[2]


def versions() -> dict[str, str]:
    """Versions that must be equal on all hosts, by name. Imports none of the libraries.

    TIDEMILL_VERSIONS="torch=9.9,python=3.15" replaces some, so that tests can have a host that differs.
    """
    told = os.environ.get("TIDEMILL_VERSIONS", "")
    return _found() | dict(word.split("=", 1) for word in told.split(",") if "=" in word)


@functools.cache
def _found() -> dict[str, str]:
    """Of this process, which imported what is there now."""
    cuda = _cuda_of_torch()
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: _installed(name).partition("+")[0] for name in _LIBRARIES},
        "sources of tidemill": hash_of_sources(_PACKAGE),
        "torch build": _installed("torch"),
        "CUDA of torch": cuda,
        "NCCL": _installed(f"nvidia-nccl-cu{cuda.partition('.')[0]}") if cuda != "none" else "none",
    }


def hash_of_sources(folder: Path) -> str:
    """Of every Python file in it: two checkouts may call themselves by the same version and still differ."""
    found = xxhash.xxh3_64()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        found.update(f"{path.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
        found.update(content)
    return found.hexdigest()


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _cuda_of_torch() -> str:
    """`torch.version.cuda`, from that file alone: importing torch takes seconds, and comes after the comparison."""
    torch = importlib.util.find_spec("torch")
    path = Path(torch.origin).with_name("version.py") if torch is not None and torch.origin else Path()
    spec = importlib.util.spec_from_file_location("torch_version", path) if path.is_file() else None
    if spec is None or spec.loader is None:
        return "none"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(vars(module).get("cuda") or "none")


def disagreement(driver: tuple[str, Mapping[str, str]], workers: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    """In words, which worker's host differs from the driver's, and in what; empty when none does. (host, versions).

    How torch was built is compared among workers only.
    """
    name, mine = driver
    libraries = [library for library in mine if library not in _OF_WORKERS]
    told: list[str] = []
    for host, theirs in workers:
        first, firsts = workers[0]
        told.append(_differences(host, theirs, f"{name}, the driver's host,", mine, libraries))
        told.append(_differences(host, theirs, first, firsts, _OF_WORKERS))
    return "; ".join(dict.fromkeys(filter(None, told)))


def _differences(
    one: str, have: Mapping[str, str], other: str, wanted: Mapping[str, str], libraries: Sequence[str]
) -> str:
    differing = [library for library in libraries if have.get(library, "none") != wanted.get(library, "none")]
    if not differing:
        return ""
    these = ", ".join(f"{library} {have.get(library, 'none')}" for library in differing)
    those = ", ".join(f"{library} {wanted.get(library, 'none')}" for library in differing)
    return f"{one} has {these}, and {other} has {those}"
