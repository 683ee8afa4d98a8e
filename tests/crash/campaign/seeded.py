"""The eleven faults of the model of the life cycle, put into a real run: a campaign that watches it must find each.

Each is called in the driver before anything else. Those of a trainer's memory are for a run of one rank, whose trainer
is in the driver.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.crash.campaign.kills import NEVER, Kill
from tests.crash.campaign.scenarios import SCENARIOS, Fault, Scenario
from tidemill import faults

_armed: list[AbstractContextManager[None]] = []


@dataclass(frozen=True, kw_only=True)
class Seeded:
    """`inject` makes the program wrong; `found` are the kinds of findings that it may first be noticed by.

    `kills` are where one has to look for it, one of them a run; none is anywhere.
    """

    inject: Fault
    found: tuple[str, ...]
    scenario: Scenario = SCENARIOS[0]
    kills: tuple[Kill, ...] = ()


def skip(*steps: str) -> None:
    """Leave steps out."""
    faults.arm(",".join(f"{step}=skip" for step in steps))


def wrong_at(point: str, name: str) -> None:
    """Do `name` of the faults of the life cycle at each pass of `point`, to all savers that there are."""
    from tests.residency import life_cycle_faults
    from tidemill.residency.savers.host_arena import HostArenaSaver

    savers: list[HostArenaSaver] = []
    begin = HostArenaSaver.__init__

    def beginning(self: HostArenaSaver, *args: Any, **words: Any) -> None:
        begin(self, *args, **words)
        savers.append(self)

    def do() -> None:
        wrong: Callable[[Any], None] = getattr(life_cycle_faults, name)
        wrong(SimpleNamespace(trainer=SimpleNamespace(savers=savers)))

    HostArenaSaver.__init__ = beginning  # type: ignore[method-assign]
    _call_at(point, do)


def not_in_ledger(left_out: str) -> None:
    """A tensor is not told of to who puts the trainer to sleep."""
    from tidemill.residency.savers.host_arena import HostArenaSaver

    add = HostArenaSaver.add

    def adding(self: HostArenaSaver, name: str, *args: Any, **words: Any) -> None:
        if name != left_out:
            add(self, name, *args, **words)

    HostArenaSaver.add = adding  # type: ignore[method-assign]


def prune_early(keep: int) -> None:
    """Older checkpoints go as soon as the newer one has its name."""
    from tests.residency.life_cycle_faults import prune_now
    from tidemill.checkpoint.manager import CheckpointManager

    made: list[Path] = []
    begin = CheckpointManager.__init__

    def beginning(self: CheckpointManager, **options: Any) -> None:
        made.append(options["folder"])
        begin(self, **options)

    def do() -> None:
        life: Any = SimpleNamespace(folder=made[-1], settings=SimpleNamespace(keep_last=keep), attempt=99)
        prune_now(life)

    CheckpointManager.__init__ = beginning  # type: ignore[method-assign]
    _call_at("checkpoint.fsync-parent", do)


def lose_a_rank() -> None:
    """Nobody asks the last rank for its pieces, and nobody counts them."""
    from tidemill.cluster.trainer_proxy import TrainerProxy

    skip("checkpoint.cover")
    taken = TrainerProxy.snapshot

    def without(self: TrainerProxy) -> Any:
        snapshot = taken(self)
        return replace(snapshot, shards=snapshot.shards[:-1])

    TrainerProxy.snapshot = without  # type: ignore[method-assign]


def fail_once() -> None:
    """No fault of the program: the disk is full for a moment."""
    faults.arm("checkpoint.write=disk-full@2")


def leak_what_failed() -> None:
    """What was held for a save is held for good; that shows where the save did not let go of it piece by piece."""
    fail_once()
    skip("checkpoint.let-go")


def _call_at(point: str, do: Callable[[], None]) -> None:
    _armed.append(faults.calling(point, do))
    _armed[-1].__enter__()


_EACH, _SLOW = SCENARIOS[1:3]
_RANKS = SCENARIOS[-1]
_GOES_ON = replace(_EACH, name="async, each step, goes on", settings=(*_EACH.settings, "on_failure=continue"))
_BROKEN, _ANY = ("torn", "mixed"), ("torn", "mixed", "unequal", "failed")


def _at(name: str, *, power: bool = True) -> tuple[Kill, ...]:
    return tuple(Kill(at="point", name=f"driver/checkpoint.{name}", nth=nth, power=power) for nth in (3, 2, 1, 4))


SEEDED = {
    "free_on_wake": Seeded(
        inject=partial(wrong_at, "residency.restore.slab", "free_pages"), found=_ANY, scenario=_SLOW
    ),
    "overwrite_referenced": Seeded(inject=partial(skip, "residency.copy-on-write"), found=_BROKEN, scenario=_SLOW),
    "unmap_before_d2h": Seeded(inject=partial(wrong_at, "residency.capture.slab", "unmap"), found=_ANY),
    "lazy_not_in_ledger": Seeded(inject=partial(not_in_ledger, "optimizer/exp_avg_sq/model.norm.weight"), found=_ANY),
    "overwrite_in_place": Seeded(
        inject=partial(skip, "checkpoint.own-folder", "checkpoint.free-name", "checkpoint.saved-once"),
        found=("torn", "lost"),
        scenario=_EACH,
        kills=_at("state", power=False),
    ),
    "missing_rank": Seeded(inject=lose_a_rank, found=("torn",), scenario=_RANKS),
    "no_data_fsync": Seeded(
        inject=partial(skip, "checkpoint.fsync-file"), found=("torn",), scenario=_EACH, kills=_at("acknowledged")
    ),
    "no_manifest_fsync": Seeded(
        inject=partial(skip, "checkpoint.fsync-manifest"), found=("torn",), scenario=_EACH, kills=_at("acknowledged")
    ),
    "no_dir_fsync": Seeded(
        inject=partial(skip, "checkpoint.fsync-parent"), found=("lost",), scenario=_EACH, kills=_at("retention.rename")
    ),
    "retention_early": Seeded(
        inject=partial(prune_early, 1), found=("lost",), scenario=_EACH, kills=_at("retention.fsync")
    ),
    "leak_refs": Seeded(inject=leak_what_failed, found=("held",), scenario=_GOES_ON, kills=(NEVER,)),
}
