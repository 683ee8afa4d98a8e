"""Numbers, events and samples of a run as JSON lines in its folder: always written, read by the run page.

`metrics.jsonl` holds lines of kind `metrics` and `eval`, equal in every run of equal settings, and `timing`, which are
not. `events.jsonl` holds what happened when (Unix times), `samples.jsonl` some answers of each step to read, and the
tokens on which engine and trainer differ most (`apart`). Every line starts with its kind and step, is ASCII, and holds
no bare NaN. A line is written whole.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tidemill.checkpoint.durable import fsync_folder, make_folder
from tidemill.contracts.events import (
    CheckpointEvent,
    Evaluated,
    Event,
    Memory,
    Metrics,
    Notice,
    PhaseDone,
    RolloutDone,
    TokensApart,
    Transition,
)
from tidemill.contracts.sample import Group, Trajectory
from tidemill.recorders.lines import cut_lines
from tidemill.recorders.text import cut
from tidemill.recorders.timing import is_timing

__all__ = ["JsonlSink"]

_encoded = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=str).encode
_FILES = ("metrics.jsonl", "events.jsonl", "samples.jsonl")


class JsonlSink:
    """Implements `Sink`. Of each rollout it keeps `groups` groups, of each group the `answers` best and worst."""

    name = "jsonl"

    def __init__(
        self,
        *,
        run: Path,
        groups: int = 4,
        answers: int = 2,
        max_characters: int = 4000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._run, self._groups, self._answers, self._max = run, groups, answers, max_characters
        self._clock = clock
        self._files: dict[str, BinaryIO] = {}

    def resume(self, step: int, state: Mapping[str, Any]) -> None:
        """Cut the files before `step` and open them. What became of checkpoints up to `step` stays true and stays."""
        self.close()
        make_folder(self._run)
        for name in _FILES:
            cut_lines(self._run / name, lambda line: _stays(line, step))
            self._files[name] = (self._run / name).open("ab")
        fsync_folder(self._run)  # the names of new files; what is in them is synced with each checkpoint

    def write(self, step: int, event: Event) -> None:
        """Append the lines of an event; Progress has none."""
        match event:
            case Metrics():
                self._append("metrics.jsonl", "timing" if is_timing(event.values) else "metrics", step, event.values)
            case Evaluated():
                self._append("metrics.jsonl", "eval", step, event.values)
            case RolloutDone():
                for line in self._samples(event.groups):
                    self._append("samples.jsonl", event.kind, step, line)
            case TokensApart():
                for token in event.tokens:
                    self._append("samples.jsonl", "apart", step, vars(token))
            case PhaseDone():
                self._append("events.jsonl", "phase", step, vars(event))
            case Memory():
                self._append("events.jsonl", "memory", step, vars(event))
            case Transition():
                self._append("events.jsonl", "transition", step, {**vars(event), "gbps": event.gbps})
            case Notice():
                self._append("events.jsonl", "notice", step, {"time": self._clock(), **vars(event)})
            case CheckpointEvent():
                line = {**vars(event), "checkpoint_step": event.step}
                self._append("events.jsonl", "checkpoint", step, line)

    def flush(self) -> None:
        """Every line so far is in its file."""
        for file in self._files.values():
            file.flush()

    def end_step(self, step: int) -> None:
        """Flush."""
        self.flush()

    def state(self) -> Mapping[str, Any]:
        """Fsyncs. Lines carry their step, so there is nothing to remember."""
        self.flush()
        for file in self._files.values():
            os.fsync(file.fileno())
        return {}

    def close(self) -> None:
        """Fsync and close the files: what a run told last is not told again once it says that it is finished."""
        while self._files:
            with self._files.popitem()[1] as file:
                file.flush()
                os.fsync(file.fileno())

    def _append(self, name: str, kind: str, step: int, values: Mapping[str, Any]) -> None:
        body, bad = finite({key: value for key, value in values.items() if key not in ("kind", "step", "nonfinite")})
        line = {"kind": kind, "step": step, **body, **({"nonfinite": bad} if bad else {})}
        self._files[name].write(_encoded(line).encode() + b"\n")

    def _samples(self, groups: Sequence[Group]) -> Iterator[Mapping[str, Any]]:
        for group in groups[: self._groups]:
            for answer in extremes(group.trajectories, self._answers):
                yield self._sample(answer)

    def _sample(self, answer: Trajectory) -> Mapping[str, Any]:
        label = answer.prompt.label
        score = answer.score
        return {
            "key": answer.prompt.key,
            "sample": answer.sample,
            "prompt": cut(answer.prompt.text, self._max),
            "answer": cut(answer.text, self._max),
            "label": cut(label if isinstance(label, str) else json.dumps(label, default=str), self._max),
            "reward": answer.reward,
            "status": "unscored" if score is None else score.status.value,
            "reason": "" if score is None else cut(score.reason, self._max),
            "parts": {} if score is None else dict(score.parts),
            "tokens": len(answer.token_ids),
            "stop": answer.stop_reason.value,
        }


def extremes(answers: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """`count` answers from the best and worst inwards, in order of `sample`; one without a reward counts as worst."""
    ranked = sorted(answers, key=lambda answer: -math.inf if answer.reward is None else answer.reward)
    order = [index for pair in zip(range(len(ranked) - 1, -1, -1), range(len(ranked)), strict=True) for index in pair]
    chosen = [ranked[index] for index in dict.fromkeys(order)][:count]
    return sorted(chosen, key=lambda answer: answer.sample)


def finite(value: Any) -> tuple[Any, int]:
    """The value with None for each float that is NaN or infinite, and how many there were."""
    if type(value) is float:  # most values are, and looking for tables first is dear
        return (value, 0) if math.isfinite(value) else (None, 1)
    if value is None or type(value) in (int, str, bool):
        return value, 0
    if isinstance(value, Mapping):
        pairs = {str(key): finite(item) for key, item in value.items()}
        return {key: item for key, (item, _) in pairs.items()}, sum(bad for _, bad in pairs.values())
    if isinstance(value, (list, tuple)):
        items = [finite(item) for item in value]
        return [item for item, _ in items], sum(bad for _, bad in items)
    if isinstance(value, float):
        return (float(value), 0) if math.isfinite(value) else (None, 1)
    if hasattr(value, "item"):  # a numpy scalar
        return finite(value.item())
    return value, 0


def _stays(line: Mapping[str, Any], step: int) -> bool:
    if line.get("kind") == "checkpoint":
        saved = line.get("checkpoint_step")
        return isinstance(saved, int) and saved <= step
    return bool(line["step"] < step)
