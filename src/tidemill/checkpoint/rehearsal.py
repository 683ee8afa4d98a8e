"""What is tried before the first step, so that a run that cannot save or export does not begin."""

from dataclasses import dataclass

from tidemill.checkpoint.commit import Committer
from tidemill.checkpoint.exports import Exports
from tidemill.checkpoint.staged import Staged
from tidemill.checkpoint.trial import in_small

__all__ = ["Rehearsal"]


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """`writes` says whether a save and an export in small are written, too, and not only looked at."""

    committer: Committer
    exports: Exports
    writes: bool

    def __call__(self, staged: Staged) -> None:
        """Try everything with `staged`, which stays the caller's. Raises CheckpointError."""
        snapshots = list(staged.snapshots.values())
        self.committer.rehearse(staged)
        self.exports.rehearse(snapshots, saves=self.committer.folder, save_bytes=staged.total_bytes)
        if self.writes:
            self.committer.try_out(in_small(staged))
            self.exports.attempt(snapshots)
