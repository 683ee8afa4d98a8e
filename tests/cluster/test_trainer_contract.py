"""tidemill.cluster.trainer_proxy and tidemill.testing.fakes.rank_trainer by the public suites, over processes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tidemill.algorithms.losses.clip import ClipLoss
from tidemill.contracts.algorithm import Loss
from tidemill.contracts.residency import Residency, Tenant
from tidemill.testing.suites.tenant import TenantSuite
from tidemill.testing.suites.trainer import MakeTrainer, TrainerSuite, ragged_batch

CLIP = ClipLoss(low=0.2, high=0.2)


@pytest.fixture
def fake_ranks(kept_ranks: Callable[[int], Any]) -> Iterator[Any]:
    ranks = kept_ranks(2)
    yield ranks
    ranks.reuse()


class TestTwoFakeRanks(TrainerSuite):
    @pytest.fixture
    def make_trainer(self, fake_ranks: Any) -> MakeTrainer:
        return fake_ranks

    @pytest.fixture
    def loss(self) -> Loss:
        return CLIP


class TestThreeFakeRanksAsATenant(TenantSuite):
    @pytest.fixture
    def tenant(self, kept_ranks: Callable[[int], Any]) -> Iterator[Tenant]:
        ranks = kept_ranks(3)
        yield ranks()
        ranks.reuse()

    def use(self, tenant: Any, residency: Residency) -> None:
        tenant.log_probs(ragged_batch())
