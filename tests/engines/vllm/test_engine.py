from pathlib import Path

import pytest
import torch

from tidemill.contracts.engine import Sampling
from tidemill.contracts.events import ignore
from tidemill.contracts.residency import Residency, Tenant
from tidemill.contracts.state import PolicyVersion
from tidemill.engines.vllm.engine import VllmEngine
from tidemill.testing.suites.engine import EngineAnswersSuite
from tidemill.testing.suites.engine_case import MakeEngine, requests_of
from tidemill.testing.suites.engine_weights import EngineWeightsSuite
from tidemill.testing.suites.tenant import TenantSuite
from tidemill.testing.tiny import make_tiny_model

FIRST = PolicyVersion(1, 0)
PROMPTS = [[5 + row, 9, 20] for row in range(10)]

pytestmark = pytest.mark.vllm


# On a GPU, where there is one. Triton's products of float32 are rounded to ten bits of mantissa there; on a CPU only
# the order of sums differs from PyTorch's.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 0.05 if DEVICE == "cuda" else 1e-3


def make(folder: Path, **settings) -> VllmEngine:
    standard = {"device": DEVICE, "dtype": "float32", "max_batch": 4, "emit": ignore, "graphs": False, "model": folder}
    return VllmEngine(**{**standard, **settings})


class TestVllmEngine(EngineAnswersSuite, EngineWeightsSuite):
    tolerance = TOLERANCE

    @pytest.fixture
    def make_engine(self) -> MakeEngine:
        return make


class TestVllmEngineAsTenant(TenantSuite):
    @pytest.fixture
    def tenant(self, tmp_path: Path) -> Tenant:
        return make(make_tiny_model(tmp_path / "model", hidden=64, heads=2, kv_heads=1))

    def use(self, tenant: VllmEngine, residency: Residency) -> None:
        tenant.load_pretrained(FIRST)
        assert len(tenant.generate(requests_of(PROMPTS), Sampling(max_new_tokens=3))) == len(PROMPTS)
