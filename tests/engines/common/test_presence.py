import pytest

from tidemill.contracts.footprint import Part
from tidemill.engines.common.presence import check_present
from tidemill.errors import ResidencyError
from tidemill.residency.gate import TenantGate


def test_what_is_asleep_or_under_no_lease_is_refused_by_name() -> None:
    gate = TenantGate("engine")
    with pytest.raises(ResidencyError, match="engine"):
        check_present(gate, Part.ALL, Part.WEIGHTS, "generate")
    gate.open(Part.ALL)
    with pytest.raises(ResidencyError, match=r"engine\.generate needs weights, kv cache .* kv cache is asleep"):
        check_present(gate, Part.WEIGHTS, Part.WEIGHTS | Part.KV_CACHE, "generate")
    check_present(gate, Part.WEIGHTS, Part.WEIGHTS, "publish")
