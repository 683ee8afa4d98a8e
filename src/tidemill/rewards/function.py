"""Scores by a Python function of the user's, run in guarded child processes: what it does wrong costs a score at most.

The function is called with all answers of a step at once (one share for each process, answers to one prompt together).
When such a call raises, hangs or dies, each of its answers is tried alone, so that only the guilty ones fail: a
function must therefore be able to score an answer alone. What is returned in a wrong form fails without a second try.

Time: a call takes `timeout` at most; trying alone takes `timeout` times (2 + failures that the budget allows) at most,
and stops as soon as the budget is exceeded. Answers not reached until then have failed.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import groupby
from typing import Any

from tidemill.contracts.events import Emit, Notice
from tidemill.contracts.sample import Score, ScoreStatus, Trajectory
from tidemill.errors import RewardError
from tidemill.rewards.pool import Pool

__all__ = ["FunctionReward"]

_NO_KEYWORDS: Mapping[str, Any] = {}


class FunctionReward:
    """The function `use` (`module:function` or `path.py:function`), looked up in the child process only.

    `timeout` is in seconds a call, `memory` in bytes of address space that a process may grow by after its module was
    loaded (large libraries are best imported at the top of the module, where they do not count), `failure_budget` the
    part of a step's answers that may fail. `keywords` (JSON values) are given to the function besides the answers;
    `name` is for messages. Raises PluginError when the function cannot be loaded.
    """

    def __init__(
        self,
        *,
        use: str,
        timeout: float,
        memory: int,
        workers: int,
        failure_budget: float,
        emit: Emit,
        keywords: Mapping[str, Any] = _NO_KEYWORDS,
        name: str = "",
    ) -> None:
        self.name = name or use
        self._timeout, self._workers, self._budget, self._emit = timeout, workers, failure_budget, emit
        self._told: set[str] = set()
        self.pool = Pool(use=use, keywords=keywords, memory=memory, workers=workers)

    def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """One score each, in order. Raises RewardError when more fail than the budget allows."""
        try:
            replies = self._ask_in_shares(trajectories)
            self._ask_one_by_one(trajectories, replies)
        except BaseException:
            # A signal must not leave processes behind that go on scoring for nobody.
            self.close()
            raise
        scores = [self._score(trajectory, reply) for trajectory, reply in zip(trajectories, replies, strict=True)]
        self._check_budget(scores)
        return scores

    def close(self) -> None:
        """End the child processes. May be called twice."""
        self.pool.close()

    def _ask_in_shares(self, trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
        """An entry or a failure for each; `again` marks those to try alone."""
        shares = _shares(trajectories, self._workers)
        futures = [self.pool.submit([_fields(one) for one in share], self._timeout) for share in shares]
        replies: list[dict[str, Any]] = []
        for share, future in zip(shares, futures, strict=True):
            reply = self._received(future)
            replies += _spread(reply, len(share))
            if len(share) > 1 and ("error" in reply or "died" in reply):
                reason = reply.get("error") or reply["died"]
                self._tell(f"reward {self.name} failed on {len(share)} answers at once: {reason}; each is tried alone")
        return replies

    def _ask_one_by_one(self, trajectories: Sequence[Trajectory], replies: list[dict[str, Any]]) -> None:
        """Try alone those marked `again`, until all are known, the budget is exceeded or the time is over."""
        todo = deque(index for index, reply in enumerate(replies) if "again" in reply)
        failures = sum("failed" in reply and "again" not in reply for reply in replies)
        allowed = int(self._budget * len(replies))
        deadline = time.monotonic() + self._timeout * (2 + allowed)
        running: dict[Future[dict[str, Any]], int] = {}
        while (todo and failures <= allowed and time.monotonic() < deadline) or running:
            while todo and len(running) < self._workers and failures <= allowed:
                index = todo.popleft()
                running[self.pool.submit([_fields(trajectories[index])], self._timeout)] = index
            finished, _ = wait(running, timeout=self._timeout, return_when=FIRST_COMPLETED)
            for future in finished:
                index = running.pop(future)
                (replies[index],) = _spread(self._received(future), 1)
                failures += "failed" in replies[index]

    def _received(self, future: "Future[dict[str, Any]]") -> dict[str, Any]:
        reply = future.result()  # bounded: every call of a worker has a deadline
        if reply.get("printed"):
            self._tell(f"reward {self.name} printed: {reply['printed'][:500]}")
        return reply

    def _tell(self, text: str) -> None:
        """A notice the first time; a function that prints or fails does so every step."""
        if text not in self._told and len(self._told) < 100:
            self._told.add(text)
            self._emit(Notice(text=text, level="warning"))

    def _score(self, trajectory: Trajectory, reply: Mapping[str, Any]) -> Score:
        if "failed" in reply:
            reason = f"reward {self.name} failed for {trajectory.id}: {reply['failed']}"
            return Score(value=None, status=ScoreStatus.FAILED, reason=reason)
        status = ScoreStatus.ABSTAINED if reply["value"] is None else ScoreStatus.SCORED
        return Score(value=reply["value"], status=status, reason=reply["reason"], parts=reply["parts"])

    def _check_budget(self, scores: Sequence[Score]) -> None:
        failed = [score for score in scores if score.status is ScoreStatus.FAILED]
        if len(failed) > self._budget * len(scores):
            first = failed[0].reason.removeprefix(f"reward {self.name} failed for ")
            raise RewardError(
                f"reward {self.name} failed for {len(failed)} of {len(scores)} answers, more than "
                f"reward.failure_budget = {self._budget:g} allows: the first for {first}; "
                "mend the function, or raise the budget"
            )


def _fields(trajectory: Trajectory) -> dict[str, Any]:
    prompt = trajectory.prompt
    return {
        "id": trajectory.id,
        "text": trajectory.text,
        "prompt": prompt.text,
        "prompt_id": prompt.id,
        "sample": trajectory.sample,
        "label": prompt.label,
        "extra": dict(prompt.extra),
        "token_ids": list(trajectory.token_ids),
        "stop_reason": str(trajectory.stop_reason),
    }


def _shares(trajectories: Sequence[Trajectory], count: int) -> list[list[Trajectory]]:
    """At most `count` stretches of about one size; answers to one prompt stay together."""
    shares: list[list[Trajectory]] = []
    size = -(-len(trajectories) // count)
    for _, group in groupby(trajectories, key=lambda trajectory: trajectory.prompt.key):
        if not shares or len(shares[-1]) >= size:
            shares.append([])
        shares[-1].extend(group)
    return shares


def _spread(reply: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """The reply to a call as one for each of its `count` answers."""
    if "entries" in reply:
        return list(reply["entries"])
    if "broken" in reply:
        return [{"failed": f"it {reply['broken']}"}] * count
    reason = reply.get("error") or reply.get("died")
    return [{"failed": reason, "again": True} if count > 1 else {"failed": reason}] * count
