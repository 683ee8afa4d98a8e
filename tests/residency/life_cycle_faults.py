"""The eleven faults of the model of the life cycle, in the real code: each leaves a step out, or does one wrong."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.residency.life_cycle_run import Life
from tests.residency.life_cycle_settings import Settings

from tidemill import faults
from tidemill.checkpoint.catalog import entries
from tidemill.checkpoint.retention import Retention, RetentionRule
from tidemill.contracts.events import ignore

__all__ = ["FAULTS", "SOUND", "Fault"]


def nothing(life: Life) -> None:
    """Does no wrong."""


@dataclass(frozen=True)
class Fault:
    """Steps left out, as for `faults.armed`, and what is done wrong at a point, or from the start. `breaks` are the
    invariants that may notice first."""

    skips: str = ""
    point: str = "nowhere"
    wrong: Callable[[Life], None] = nothing
    at_start: Callable[[Life], None] = nothing
    breaks: str = "none"

    @contextlib.contextmanager
    def injected(self, base: Path, settings: Settings) -> Iterator[Life]:
        """A run with this fault."""
        with faults.armed(self.skips):
            life = Life(base, settings)
            try:
                self.at_start(life)
                with faults.calling(self.point, lambda: self.wrong(life)):
                    yield life
            finally:
                life.close()


def free_pages(life: Life) -> None:
    """Pages are forgotten as soon as there is memory for what they hold, though the seal stays."""
    for saver in life.trainer.savers:
        for number in saver._crossing.awake():
            for _, page in saver._arena.run(number).stretches():
                page.zero_()


def unmap(life: Life) -> None:
    """What was on the device is gone when the copy begins."""
    for saver in life.trainer.savers:
        for slab in saver._crossing.slabs:
            if slab.memory.resident:
                slab.memory.flat.zero_()


def prune_now(life: Life) -> None:
    """Older checkpoints go as soon as the newer one has its name."""
    newest = entries(life.folder)[-1].step
    rule = RetentionRule(keep_last=life.settings.keep_last)
    Retention(life.folder, rule=rule, attempt=life.attempt, emit=ignore)(newest)


def lose_a_rank(life: Life) -> None:
    """Nobody asks rank 1 for its pieces."""
    life.silent.add(1)


SOUND = Fault()
FAULTS = {
    "free_on_wake": Fault(point="residency.restore.slab", wrong=free_pages, breaks="I1|I2|I3|I11"),
    "overwrite_referenced": Fault(skips="residency.copy-on-write=skip", breaks="I3"),
    "unmap_before_d2h": Fault(point="residency.capture.slab", wrong=unmap, breaks="I1|I2|I11"),
    "lazy_not_in_ledger": Fault(skips="residency.add:m1=skip", breaks="I2|I4"),
    "overwrite_in_place": Fault(
        skips="checkpoint.own-folder=skip,checkpoint.free-name=skip,checkpoint.saved-once=skip", breaks="I10|I12"
    ),
    "missing_rank": Fault(skips="checkpoint.cover=skip", at_start=lose_a_rank, breaks="I9|I10"),
    "no_data_fsync": Fault(skips="checkpoint.fsync-file=skip", breaks="I10"),
    "no_manifest_fsync": Fault(skips="checkpoint.fsync-manifest=skip", breaks="I10"),
    "no_dir_fsync": Fault(skips="checkpoint.fsync-parent=skip", breaks="I10"),
    "retention_early": Fault(point="checkpoint.fsync-parent", wrong=prune_now, breaks="I10"),
    "leak_refs": Fault(skips="checkpoint.let-go=skip", breaks="I5"),
}
