"""The door of a tenant (`tidemill.residency.gate`)."""

import pytest

from tidemill.contracts.footprint import Part
from tidemill.errors import ResidencyError
from tidemill.residency.gate import TenantGate


def test_a_closed_gate_names_tenant_operation_and_what_is_missing() -> None:
    gate = TenantGate("trainer")
    gate.open(Part.WEIGHTS)
    with pytest.raises(ResidencyError, match=r"trainer\.step needs a lease of trainer .* optimizer is not leased"):
        gate.check(Part.WEIGHTS | Part.OPTIMIZER, "step")


def test_a_gate_allows_what_was_opened_until_it_is_closed() -> None:
    gate = TenantGate("engine")
    gate.open(Part.WEIGHTS)
    gate.open(Part.KV_CACHE)
    gate.check(Part.WEIGHTS | Part.KV_CACHE, "generate")
    gate.close(Part.KV_CACHE)
    gate.check(Part.WEIGHTS, "load_weights")
    assert gate.allowed == Part.WEIGHTS
    with pytest.raises(ResidencyError, match="kv cache is not leased"):
        gate.check(Part.KV_CACHE, "generate")


def test_checking_nothing_never_fails() -> None:
    TenantGate("engine").check(Part.NONE, "close")
