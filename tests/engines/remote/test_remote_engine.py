"""tidemill.engines.remote.build, parts, engine, dialect, vllm_dialect and sglang_dialect, by the public suites.

That is tidemill.engines.remote.build, tidemill.engines.remote.parts, tidemill.engines.remote.engine,
tidemill.engines.remote.dialect, tidemill.engines.remote.vllm_dialect and tidemill.engines.remote.sglang_dialect.
"""

from pathlib import Path
from typing import Any

import pytest
from tests.engines.remote.conftest import Servers

from tidemill.contracts.engine import RolloutEngine, Sampling
from tidemill.errors import EngineError
from tidemill.testing.suites.engine import EngineAnswersSuite
from tidemill.testing.suites.engine_case import MakeEngine, requests_of
from tidemill.testing.suites.engine_weights import EngineWeightsSuite


def maker(make: Servers, count: int, **serve: Any) -> MakeEngine:
    def made(folder: Path) -> RolloutEngine:
        engine: RolloutEngine = make(folder, count, serve=serve, max_batch=8)
        return engine

    return made


class TestVllmServers(EngineAnswersSuite, EngineWeightsSuite):
    @pytest.fixture
    def make_engine(self, make: Servers) -> MakeEngine:
        return maker(make, 2)


class TestAnOlderVllmServer(EngineAnswersSuite, EngineWeightsSuite):
    @pytest.fixture
    def make_engine(self, make: Servers) -> MakeEngine:
        return maker(make, 1, modern=False)


class TestSglangServers(EngineAnswersSuite, EngineWeightsSuite):
    @pytest.fixture
    def make_engine(self, make: Servers) -> MakeEngine:
        return maker(make, 2, dialect="sglang")

    def test_top_k_and_top_p_renormalise_over_what_they_keep(self, engine: RolloutEngine, model: Any) -> None:
        """Not on SGLang, which reports log-probs over all tokens: refused instead."""
        for asked in ({"top_k": 5}, {"top_p": 0.8}):
            with pytest.raises(EngineError, match="over all tokens"):
                engine.generate(requests_of(self.prompts), Sampling(max_new_tokens=6, **asked))
