"""Who sleeps for whom in a run, as the run itself will decide it."""

from collections.abc import Mapping
from dataclasses import dataclass

from tidemill.config.run import RunConfig
from tidemill.errors import ConfigError
from tidemill.planning.budget import AUTO_SHARE, NO_LIMIT, budget_for, check_budget, offload_mode
from tidemill.planning.groups import parks_groups
from tidemill.planning.machine import Machine
from tidemill.planning.setup import Setup
from tidemill.planning.tenants import Tenants
from tidemill.units import GIB, MIB, format_bytes

__all__ = ["CONTEXT_BYTES", "Choice", "choose", "group_bytes"]

CONTEXT_BYTES = int(0.61 * GIB)
"""Of one process on a GPU: measured on an H200."""

_WORLD_BYTES = 484 * MIB  # of a rank's process group on a GPU, measured likewise


@dataclass(frozen=True, kw_only=True)
class Choice:
    """`budget` is None when no number is known. `turns`: one sleeps while the other works.

    `both_from` are the device's bytes from which on `auto` keeps both awake, `least` those below which it refuses.
    `refusal` says why the run would be refused, and is empty when it would not.
    """

    mode: str
    budget: int | None
    turns: bool
    parks: bool
    sentence: str
    refusal: str
    both_from: int
    least: int


def group_bytes(setup: Setup, *, replicas: int) -> int:
    """Device memory of one rank's process groups: of all ranks, and of two dimensions when the model is there twice."""
    groups = 0 if setup.ranks == 1 else 1 if replicas == 1 else 3
    return groups * _WORLD_BYTES if setup.device == "cuda" else 0


def choose(config: RunConfig, setup: Setup, machine: Machine, tenants: Tenants) -> Choice:
    """What `auto`, `always` and `never` come to."""
    sizes = tenants.sizes()
    overhead = group_bytes(setup, replicas=config.trainer.replicas)
    overhead += setup.contexts * CONTEXT_BYTES if setup.device == "cuda" else 0
    everything = tenants.state.footprint + tenants.engine
    together = max(tenants.state.footprint + tenants.engine_weights, tenants.engine)
    known = {
        "both_from": int(everything / AUTO_SHARE) + overhead,
        "least": int(together / AUTO_SHARE) + overhead,
    }
    if not setup.shared:
        apart = "have GPUs of their own" if setup.device == "cuda" else "take no turns on a CPU"
        sentence = f"trainer and engine {apart}: both stay awake"
        return Choice(mode="never", budget=NO_LIMIT, turns=False, parks=False, sentence=sentence, refusal="", **known)
    mode = offload_mode(
        trainer=config.trainer.offload, engine=config.engine.offload, residency=config.residency.offload
    )
    budget, sentence = _budget(config, mode, _device_bytes(setup, machine, overhead), sizes)
    turns = bool(setup.replicas) and (budget is None or everything > budget)
    parks, _ = parks_groups(
        config.residency.park_groups,
        offload=mode,
        device=setup.device,
        ranks=setup.ranks,
        budget=0 if budget is None else budget,
        engine_bytes=tenants.engine,
    )
    refusal = _refusal(budget, sizes)
    return Choice(mode=mode, budget=budget, turns=turns, parks=parks, sentence=sentence, refusal=refusal, **known)


def _refusal(budget: int | None, sizes: Mapping[str, int]) -> str:
    if budget is None:
        return ""
    try:
        check_budget(budget, **sizes)
    except ConfigError as error:
        return str(error)
    return ""


def _device_bytes(setup: Setup, machine: Machine, overhead: int) -> int | None:
    """What tenants may share on one device; on a CPU one worker's part of what the host has."""
    if setup.device == "cuda":
        return None if machine.device_bytes is None else max(0, machine.device_bytes - overhead)
    return None if machine.host_bytes is None else machine.host_bytes // setup.workers


def _budget(config: RunConfig, mode: str, device_bytes: int | None, sizes: Mapping[str, int]) -> tuple[int | None, str]:
    explicit = config.residency.budget
    if mode == "auto" and explicit != "auto":
        return (
            explicit,
            f"residency.budget is {format_bytes(explicit)}: who is idle sleeps when another needs the bytes",
        )
    if mode == "auto" and device_bytes is None:
        return None, "offload is auto and the device's memory is not known: planned as if they take turns"
    return budget_for(mode, **sizes, device_bytes=device_bytes or 0)
