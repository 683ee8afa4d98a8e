"""What must hold of a tenant's memory between any two moves."""

import contextlib
from collections.abc import Sequence

from tests.residency.life_cycle_tenants import PAGE, RankedTenant, Version, as_bytes, contents_of

from tidemill.contracts.checkpoint import Snapshot
from tidemill.contracts.footprint import Part
from tidemill.errors import CheckpointError

__all__ = ["WHOLE", "check_memory", "check_unchanged"]

WHOLE = Part.WEIGHTS | Part.OPTIMIZER


def check_memory(tenant: RankedTenant) -> None:
    """I2, I4, I6 and I7."""
    resident, state = tenant.resident(), tenant.footprint(Part.ALL)
    assert tenant.device_bytes() == tenant.footprint(resident), "I4 the device holds what sleeps"
    spares = sum(saver._arena.spare_pages for saver in tenant.savers)
    assert spares * PAGE <= state, "I6 more pages than the state and what one writer may hold"
    assert tenant.host_bytes() <= 2 * state, "I6 more pages than the state and what one writer may hold"
    if resident == WHOLE:
        return
    assert tenant.sealed(), "I7 memory was unmapped without a seal"
    for rank, saver in enumerate(tenant.savers):
        snapshot = saver.snapshot()
        seen = {key: bytes(tensor.data) for key, tensor in snapshot.tensors.items()}
        snapshot.release()
        assert seen == tenant.expected()[rank], "I2 the sealed pages are not one whole version"


def check_unchanged(held: Sequence[Snapshot], version: Version) -> None:
    """I3, of snapshots by rank that were taken of this version."""
    for rank, snapshot in enumerate(held):
        expected = as_bytes(contents_of(rank, version))
        for name, tensor in snapshot.tensors.items():
            with contextlib.suppress(CheckpointError):  # it was written, and let go of
                assert bytes(tensor.data) == expected[name], f"I3 {name} changed while it was to be written"
