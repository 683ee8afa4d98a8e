"""What every tenant must do. Subclass `TenantSuite`, give it a tenant and one operation that touches its memory."""

import pytest

from tidemill.contracts.events import ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.residency import Residency, Tenant
from tidemill.errors import ResidencyError
from tidemill.residency.manager import LeaseManager
from tidemill.testing.fakes.device import FakeTenant

__all__ = ["TenantSuite"]


class TenantSuite:
    """Override the fixture `tenant` and the method `use`."""

    @pytest.fixture
    def tenant(self) -> Tenant:
        """A tenant with some bytes, awake or asleep."""
        raise NotImplementedError("override the fixture `tenant`")

    def use(self, tenant: Tenant, residency: Residency) -> None:
        """An operation that needs the lease for everything; the caller may or may not hold it."""
        raise NotImplementedError("override `use`")

    @pytest.fixture
    def rival(self) -> FakeTenant:
        """A tenant beside which there is no room for the one under test."""
        return FakeTenant("rival", {Part.WEIGHTS: 1}, keeps=Part.NONE)

    @pytest.fixture
    def residency(self, tenant: Tenant) -> Residency:
        """Room for the tenant alone."""
        return LeaseManager(budget=tenant.footprint(Part.ALL), emit=ignore, deadline=1.0)

    def present(self, tenant: Tenant) -> Part:
        """The parts that it has bytes of."""
        parts = Part.NONE
        for part in Part.ALL:
            parts |= part if tenant.footprint(part) else Part.NONE
        return parts

    def test_footprints_of_parts_add_up(self, tenant: Tenant) -> None:
        assert tenant.footprint(Part.NONE) == 0
        assert tenant.footprint(Part.ALL) == sum(tenant.footprint(part) for part in Part.ALL) > 0

    def test_a_footprint_is_the_same_awake_and_asleep(self, tenant: Tenant) -> None:
        tenant.wake_up(Part.ALL)
        awake = [tenant.footprint(part) for part in Part.ALL]
        tenant.sleep()
        assert [tenant.footprint(part) for part in Part.ALL] == awake

    def test_sleep_gives_everything_back(self, tenant: Tenant) -> None:
        tenant.wake_up(Part.ALL)
        tenant.sleep()
        assert tenant.footprint(tenant.resident()) == 0

    def test_transitions_may_be_repeated(self, tenant: Tenant) -> None:
        for _ in range(2):
            tenant.wake_up(Part.ALL)
            assert self.present(tenant) in tenant.resident()
        for _ in range(2):
            tenant.sleep()
            assert tenant.footprint(tenant.resident()) == 0

    def test_waking_by_part_brings_that_part_and_keeps_the_others(self, tenant: Tenant) -> None:
        tenant.sleep()
        woken = Part.NONE
        for part in self.present(tenant):
            tenant.wake_up(part)
            woken |= part
            assert woken in tenant.resident()

    def test_use_without_a_lease_raises_awake_and_asleep(self, tenant: Tenant, residency: Residency) -> None:
        tenant.wake_up(Part.ALL)
        with pytest.raises(ResidencyError, match=tenant.name):
            self.use(tenant, residency)
        tenant.sleep()
        with pytest.raises(ResidencyError, match=tenant.name):
            self.use(tenant, residency)

    def test_use_works_within_a_lease_and_raises_again_behind_it(self, tenant: Tenant, residency: Residency) -> None:
        with residency.awake(tenant):
            self.use(tenant, residency)
        with pytest.raises(ResidencyError):
            self.use(tenant, residency)

    def test_use_works_after_many_sleeps_and_host_memory_stays_flat(
        self, tenant: Tenant, residency: Residency, rival: FakeTenant
    ) -> None:
        host = []
        for _ in range(5):
            with residency.awake(tenant):
                self.use(tenant, residency)
            with residency.awake(rival):
                assert tenant.footprint(tenant.resident()) == 0
                host.append(tenant.host_bytes())
        assert host[1:] == host[:-1]
