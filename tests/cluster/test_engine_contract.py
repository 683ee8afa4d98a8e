"""tidemill.cluster.engine_proxy and tidemill.cluster.engine_service by the public suites, over processes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cluster.folder_parts import Workers, pool

from tidemill.cluster.engine_proxy import EngineProxy
from tidemill.contracts.engine import Sampling
from tidemill.contracts.residency import Residency, Tenant
from tidemill.contracts.state import PolicyVersion
from tidemill.testing.suites.engine import EngineAnswersSuite
from tidemill.testing.suites.engine_case import MakeEngine, requests_of
from tidemill.testing.suites.engine_weights import EngineWeightsSuite
from tidemill.testing.suites.tenant import TenantSuite
from tidemill.testing.tiny import make_tiny_model

workers = pytest.fixture(scope="module")(pool)


@pytest.fixture
def one(workers: Callable[[str, int], Workers]) -> Iterator[Workers]:
    yield workers("engine", 1)
    workers("engine", 1).reuse()


@pytest.fixture
def two(workers: Callable[[str, int], Workers]) -> Iterator[Workers]:
    yield workers("engine", 2)
    workers("engine", 2).reuse()


class TestOneReplica(EngineAnswersSuite, EngineWeightsSuite):
    @pytest.fixture
    def make_engine(self, one: Workers) -> MakeEngine:
        return one.engine


class TestTwoReplicas(EngineAnswersSuite, EngineWeightsSuite):
    @pytest.fixture
    def make_engine(self, two: Workers) -> MakeEngine:
        return two.engine


class TestTwoReplicasAsATenant(TenantSuite):
    @pytest.fixture
    def tenant(self, two: Workers, tmp_path: Path) -> Tenant:
        return two.engine(make_tiny_model(tmp_path / "model", hidden=32, heads=2, kv_heads=1))

    def use(self, tenant: EngineProxy, residency: Residency) -> None:
        tenant.load_pretrained(PolicyVersion(1, 0))
        assert len(tenant.generate(requests_of([[5, 6], [7, 8], [9]]), Sampling(max_new_tokens=3))) == 3
