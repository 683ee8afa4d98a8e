"""Dumped rollouts in place of new ones: the trainer's half of a run, again, without an engine.

Answers, log-probs and scores are those that were dumped, under the policy version of then. Prompts are matched by key,
so that data, seed and batch may be cut otherwise. But every prompt asked for must have been dumped, with as many
answers as this run takes, sampled from the distribution that this run's settings name: the trainer's log-probs are
compared with those.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from tidemill.contracts.engine import RolloutEngine, Sampling
from tidemill.contracts.events import Emit, RolloutDone, ignore
from tidemill.contracts.sample import Group, Prompt
from tidemill.errors import DataError
from tidemill.rollout.dump import distribution, dumped_steps, read_dump

__all__ = ["ReplayRollout"]


class ReplayRollout:
    """Implements Rollout from a folder that `RolloutDump` wrote, for a run of this `sampling` and so many `samples`.

    Raises DataError when it holds no dump, or the first step of it was sampled otherwise.
    """

    def __init__(self, folder: Path, *, sampling: Sampling, samples: int, emit: Emit = ignore) -> None:
        self.folder = Path(folder)
        self._sampling, self._samples = distribution(sampling), samples
        self._emit = emit
        self._ahead = dumped_steps(self.folder)
        self._file_of: dict[str, Path] = {}
        # A step's prompts lie in one file, or in a few where steps take another number of them than then.
        self._read = lru_cache(maxsize=4)(self._groups_of)
        self._read(self._ahead[0])

    def collect(self, engine: RolloutEngine, prompts: Sequence[Prompt]) -> list[Group]:
        """The dumped groups of these prompts, in their order; `engine` is not used.

        Raises DataError when one was not dumped, or was dumped with other tokens, sampling or number of answers.
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
        if len(group.trajectories) != self._samples:
            raise DataError(
                f"cannot replay prompt {prompt.key}: {len(group.trajectories)} answers to it were dumped in "
                f"{self.folder} and this run takes {self._samples}; set rollout.samples = {len(group.trajectories)}"
            )
        return group

    def _groups_of(self, path: Path) -> dict[str, Group]:
        step = read_dump(path)
        for name, dumped in step.sampling.items():
            if dumped != self._sampling[name]:
                raise DataError(
                    f"cannot replay {path}: its answers were sampled with {name} = {dumped:g}, and this run has "
                    f"rollout.sampling.{name} = {self._sampling[name]:g}, so their log-probabilities are of another "
                    f"distribution; set it to {dumped:g}, or dump rollouts again"
                )
        return {group.prompt.key: group for group in step.groups}
