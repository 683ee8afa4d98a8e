"""Engines over stub servers."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.engines.stub_server import Stub, stubs

from tidemill.contracts.events import Event
from tidemill.contracts.state import PolicyVersion
from tidemill.engines.remote.build import remote_engine
from tidemill.engines.remote.engine import ServerEngine
from tidemill.testing.suites.engine_case import open_awake
from tidemill.testing.tiny import make_tiny_model

FIRST = PolicyVersion(1, 0)


class Servers:
    """Makes engines over `servers`, new ones for each."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.events: list[Event] = []
        self.servers: list[Stub] = []

    def __call__(self, folder: Path, count: int = 2, *, serve: dict[str, Any] | None = None, **settings: Any) -> Any:
        serve = serve or {}
        self.servers = self._stack.enter_context(stubs(folder, count, **serve))
        told: dict[str, Any] = {
            "model": folder,
            "urls": tuple(server.url for server in self.servers),
            "server": serve.get("dialect", "vllm"),
            "dtype": "float32",
            "max_batch": 4,
            "emit": self.events.append,
            "health_every": 0.1,
            "recovery": 5.0,
            "cache_memory": 1 << 20,
        }
        engine = remote_engine(**{**told, **settings})
        self._stack.callback(engine.close)
        return engine

    def ready(self, folder: Path, count: int = 2, **settings: Any) -> ServerEngine:
        """Awake, leased, with the folder's weights."""
        engine: ServerEngine = self(folder, count, **settings)
        open_awake(engine)
        engine.load_pretrained(FIRST)
        return engine


@pytest.fixture
def make() -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(stack)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", hidden=64, heads=2, kv_heads=1)
