"""Bytes of a run before it starts: by part and moment, on each device and in host memory.

State, weights, cache and host pages are exactly what trainer and engine will say of themselves; the rest is counted, or
estimated from above.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.config.run import RunConfig
from tidemill.planning.budget import NO_LIMIT
from tidemill.planning.choice import Choice, choose, group_bytes
from tidemill.planning.disk import Disk, disk_of
from tidemill.planning.machine import Machine
from tidemill.planning.model_folder import Model, read_model
from tidemill.planning.moments import Moment, Seat, device_seats, host_moments
from tidemill.planning.setup import Setup, setup_of
from tidemill.planning.tenants import Tenants, tenants_of

__all__ = ["Plan", "plan_of"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`seats` are the GPUs, none on a CPU; `host` are the moments of host memory."""

    model: Model
    machine: Machine
    setup: Setup
    tenants: Tenants
    choice: Choice
    seats: tuple[Seat, ...]
    host: tuple[Moment, ...]
    disk: Disk

    @property
    def largest_on_host(self) -> Moment:
        """The moment at which host memory is fullest."""
        return max(self.host, key=lambda moment: moment.bytes)

    def to_json(self) -> dict[str, Any]:
        """One shape for all plans; bytes are integers, None where nobody knows."""
        decoder, choice = self.model.decoder, self.choice
        return {
            "model": {
                "folder": str(self.model.folder),
                "architecture": decoder.architecture,
                "parameters": self.model.parameters,
                "tied": decoder.tied,
                "source": self.model.source,
            },
            "machine": {
                "device": self.machine.device,
                "device_bytes": self.machine.device_bytes,
                "host_bytes": self.machine.host_bytes,
            },
            "offload": {
                "mode": choice.mode,
                "budget": None if choice.budget == NO_LIMIT else choice.budget,
                "turns": choice.turns,
                "parks_groups": choice.parks,
                "both_awake_from": choice.both_from,
                "refused_below": choice.least,
                "text": choice.sentence,
            },
            "tenants": self.tenants_json(),
            "devices": [
                {
                    "name": seat.name,
                    "count": seat.count,
                    "largest": seat.largest.name,
                    "moments": _moments(seat.moments),
                }
                for seat in self.seats
            ],
            "host": {"largest": self.largest_on_host.name, "moments": _moments(self.host)},
            "disk": vars(self.disk) | {"needed": self.disk.needed},
        }

    def tenants_json(self) -> dict[str, dict[str, int]]:
        """What each tenant will say that it holds: on the fullest device, and in host memory of all its workers."""
        arena, state = self.tenants.arena, self.tenants.state
        found = {"trainer": {"device": state.footprint, "host": self.setup.ranks * (arena.pages + arena.spares)}}
        if self.setup.replicas:
            found["engine"] = {
                "device": self.tenants.engine,
                "host": self.setup.replicas * self.tenants.engine_host,
            }
        return found


def _moments(moments: Sequence[Moment]) -> list[dict[str, Any]]:
    return [{"name": moment.name, "bytes": moment.bytes, "parts": dict(moment.parts)} for moment in moments]


def plan_of(config: RunConfig, machine: Machine) -> Plan:
    """Reads the model folder's config.json and the headers of its files, and nothing else.

    Raises DataError for a model that nobody can plan for, ConfigError for parts that are not Tidemill's own.
    """
    setup = setup_of(config, device=machine.device)
    model = read_model(config.model)
    shards = config.trainer.ranks // config.trainer.replicas
    spare = None if config.residency.spare == "auto" else config.residency.spare
    tenants = tenants_of(model, setup, shards=shards, page_bytes=config.residency.page, spare_bytes=spare)
    choice = choose(config, setup, machine, tenants)
    groups = group_bytes(setup, replicas=config.trainer.replicas)
    return Plan(
        model=model,
        machine=machine,
        setup=setup,
        tenants=tenants,
        choice=choice,
        seats=device_seats(model, setup, tenants, choice, groups=groups),
        host=host_moments(model, setup, tenants, choice),
        disk=disk_of(config, model),
    )
