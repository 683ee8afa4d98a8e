"""tidemill.cluster.trainer_proxy and tidemill.testing.fakes.rank_trainer by the public suites, over processes.

The suites' helpers of states, tidemill.testing.suites.trainer_case, write shards to files and join them.
"""

from typing import Any

import pytest

from tidemill.algorithms.losses.clip import ClipLoss
from tidemill.contracts.algorithm import Loss
from tidemill.contracts.residency import Residency, Tenant
from tidemill.testing.suites.tenant import TenantSuite
from tidemill.testing.suites.trainer import MakeTrainer, TrainerSuite, ragged_batch

CLIP = ClipLoss(low=0.2, high=0.2)


class TestTwoFakeRanks(TrainerSuite):
    @pytest.fixture
    def make_trainer(self, two_ranks: Any) -> MakeTrainer:
        return two_ranks

    @pytest.fixture
    def loss(self) -> Loss:
        return CLIP


class TestThreeFakeRanksAsATenant(TenantSuite):
    @pytest.fixture
    def tenant(self, three_ranks: Any) -> Tenant:
        return three_ranks()

    def use(self, tenant: Any, residency: Residency) -> None:
        tenant.log_probs(ragged_batch())
