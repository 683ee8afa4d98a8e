"""Dumped rollouts in place of new ones: the trainer's half of a run, again, without an engine.

Answers, log-probs and scores are those that were dumped, under the policy version of then. Prompts are matched by key,
so that data, seed and batch may be cut otherwise, but every prompt asked for must have been dumped.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tidemill.contracts.engine import RolloutEngine
from tidemill.contracts.events import Emit, RolloutDone, ignore
from tidemill.contracts.sample import Group, Prompt
from tidemill.errors import DataError
from tidemill.rollout.dump import dumped_steps, read_dump

__all__ = ["ReplayRollout"]


class ReplayRollout:
    """Implements Rollout from a folder that `RolloutDump` wrote. Raises DataError when it holds no dump."""

    def __init__(self, folder: Path, *, emit: Emit = ignore) -> None:
        self.folder = Path(folder)
        self._emit = emit
        self._ahead = dumped_steps(self.folder)
        self._file_of: dict[str, Path] = {}
        # A step's prompts lie in one file, or in a few where steps take another number of them than then.
        self._read = lru_cache(maxsize=4)(_groups_of)

    def collect(self, engine: RolloutEngine, prompts: Sequence[Prompt]) -> list[Group]:
        """The dumped groups of these prompts, in their order; `engine` is not used.

        Raises DataError when one was not dumped, or was dumped with other tokens.
        """
        groups = [self._group(prompt) for prompt in prompts]
        self._emit(RolloutDone(kind="train", groups=groups))
        return groups

    def _group(self, prompt: Prompt) -> Group:
        while prompt.key not in self._file_of and self._ahead:
            path = self._ahead.pop(0)
            self._file_of.update(dict.fromkeys(self._read(path), path))
        if prompt.key not in self._file_of:
            raise DataError(
                f"cannot replay prompt {prompt.key}: it is not among the {len(self._file_of)} prompts dumped in "
                f"{self.folder}; use the data, seed and number of steps of the dumped run"
            )
        group = self._read(self._file_of[prompt.key])[prompt.key]
        if group.prompt.token_ids != prompt.token_ids:
            raise DataError(
                f"cannot replay prompt {prompt.key}: its tokens differ from those dumped in {self.folder}; "
                "use the data, model and chat template of the dumped run"
            )
        return group


def _groups_of(path: Path) -> dict[str, Group]:
    return {group.prompt.key: group for group in read_dump(path).groups}
