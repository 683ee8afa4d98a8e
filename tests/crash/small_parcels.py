"""A cluster of forked processes that ships even a tiny model in several parcels, so that a kill comes between two."""

from typing import ClassVar

from tidemill.cluster.weight_shipping import ShippedWeightSync
from tidemill.contracts.events import Emit
from tidemill.contracts.residency import Residency
from tidemill.contracts.weights import Samples
from tidemill.testing.spawned_cluster import SpawnedCluster, SpawnedClusterSettings


class SmallParcelsSettings(SpawnedClusterSettings):
    """`cluster.use = "tests.crash.small_parcels:SmallParcelsSettings"`."""

    implementation: ClassVar[str] = "tests.crash.small_parcels:SmallParcels"


class SmallParcels(SpawnedCluster):
    """As SpawnedCluster."""

    def weight_sync(self, residency: Residency, emit: Emit, *, samples: Samples) -> ShippedWeightSync:
        """In parcels of 48 KiB."""
        return ShippedWeightSync(residency=residency, emit=emit, bucket_bytes=48 << 10, samples=samples)
