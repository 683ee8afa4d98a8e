"""What trainer and engine say that they hold, before they are there: the same bytes, from the same rules."""

from dataclasses import dataclass

from tidemill.planning.model_folder import Model
from tidemill.planning.setup import Setup
from tidemill.planning.state import (
    Arena,
    RankState,
    arena_of,
    cache_bytes,
    engine_host_bytes,
    engine_weights,
    page_size,
    rank_state,
)

__all__ = ["Tenants", "tenants_of"]


@dataclass(frozen=True, kw_only=True)
class Tenants:
    """`state` and `arena` are one rank's, the rest one replica's; nothing of an engine when there is none."""

    state: RankState
    arena: Arena
    engine_weights: int
    cache: int
    engine_host: int

    @property
    def engine(self) -> int:
        """Weights and the largest cache."""
        return self.engine_weights + self.cache

    def sizes(self) -> dict[str, int]:
        """As a budget is decided with."""
        return {
            "trainer_bytes": self.state.footprint,
            "engine_weight_bytes": self.engine_weights,
            "engine_bytes": self.engine,
        }


def tenants_of(model: Model, setup: Setup, *, shards: int, page_bytes: int, spare_bytes: int | None) -> Tenants:
    """Of a trainer cut over `shards` ranks, and of an engine if the run has one; pages as they are set."""
    page_bytes = page_size(page_bytes)
    state = rank_state(model, shards=shards, page_bytes=page_bytes)
    generation, there = setup.generation, bool(setup.replicas)
    cache = generation.cache_bytes or cache_bytes(
        model.decoder, positions=generation.positions, itemsize=generation.itemsize
    )
    return Tenants(
        state=state,
        arena=arena_of(state.slabs, page_bytes=page_bytes, spare_bytes=spare_bytes),
        engine_weights=engine_weights(model, itemsize=generation.itemsize) if there else 0,
        cache=cache if there else 0,
        engine_host=engine_host_bytes(model) if there else 0,
    )
