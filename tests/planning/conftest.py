"""Settings over model folders made on the spot, and what a machine has."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tidemill.config.load import load
from tidemill.config.run import RunConfig
from tidemill.planning.machine import Machine
from tidemill.units import GIB

Settings = Callable[..., RunConfig]

CPU = Machine(device="cpu", device_bytes=None, host_bytes=64 * GIB)
GPU = Machine(device="cuda", device_bytes=80 * GIB, host_bytes=640 * GIB)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """A run of the model in a folder, with words such as `trainer.ranks=2`."""

    def make(model: Path, *words: str) -> RunConfig:
        named = [f"model={model}", "steps=5", f"run.dir={tmp_path / 'run'}", f"data.prompts={tmp_path / 'prompts'}"]
        return load([], [*named, *words], check_files=False).config

    return make
