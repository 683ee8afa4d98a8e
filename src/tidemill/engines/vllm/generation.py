"""Answers from vLLM: requests in, steps until all have ended, ids and log-probs out.

The loop is ours, so that progress is told, a step that leads nowhere ends, stop strings end an answer at the very token
that completes one, and whatever is raised in between leaves no request behind.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tidemill.contracts.engine import Request, Sampling
from tidemill.contracts.events import Emit, Progress
from tidemill.contracts.sample import StopReason
from tidemill.engines.common.answers import Answer
from tidemill.engines.common.sampling import row_keys
from tidemill.engines.common.stopping import StopStrings
from tidemill.errors import EngineError

__all__ = ["Draws", "Generation"]

_LOOKS_EVERY = 1.0  # seconds
_MOST_STEPS_TO_SETTLE = 100


class Draws(Protocol):
    """How tokens are drawn: `begin` for all requests that come, `add` for each, by vLLM's inner name."""

    def begin(self, *, top_k: int, top_p: float) -> None:
        """Requests that come are sampled so."""
        ...

    def add(self, request: str, key: int) -> None:
        """`request` draws by `key`, a number below 2^64."""
        ...


@dataclass
class _Open:
    """An answer that is still coming."""

    key: str
    inner: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Generation:
    """One call of `answers` at a time. `deadline` is the longest time in seconds without any token computed."""

    def __init__(
        self,
        *,
        llm: Any,
        draws: Draws,
        end_ids: Sequence[int],
        tokenizer: Any,
        seeded: bool,
        deadline: float,
        emit: Emit,
    ) -> None:
        """`seeded`: vLLM draws by a request's seed, and by nothing else."""
        self._llm = llm
        self._runner = llm.model_executor.driver_worker.model_runner
        self._core = llm.engine_core.engine_core
        self._draws = draws
        self._end_ids = frozenset(end_ids)
        self._tokenizer = tokenizer
        self._seeded = seeded
        self._deadline = deadline
        self._emit = emit
        self._open: dict[str, _Open] = {}
        self._settled = True

    def answers(self, requests: Sequence[Request], sampling: Sampling) -> list[Answer]:
        """In the order of the requests. Raises EngineError when vLLM gets nowhere, or was left in an unknown state."""
        self.settle()
        found: dict[int, Answer] = {}
        self._settled = False
        try:
            self._add(requests, sampling)
            self._run(found, sampling, total=len(requests))
        except BaseException:
            self.settle_if_possible()
            raise
        self._settled = True
        return [found[index] for index in range(len(requests))]

    def settle_if_possible(self) -> None:
        """As `settle`; when that fails it is tried, and told, at the next use."""
        try:
            self.settle()
        except EngineError:
            return

    def settle(self) -> None:
        """End what an interrupted call has left, so that vLLM holds no request and no block of its cache.

        Raises EngineError when that cannot be: it was interrupted while it changed its own books.
        """
        if self._settled:
            return
        try:
            self._end_all()
            clean = bool(self._llm.reset_prefix_cache())
        except Exception as error:
            raise self._spoiled(f"{type(error).__name__}: {error}") from error
        if not clean:
            raise self._spoiled("blocks of its cache are held by no request")
        self._settled = True

    def _end_all(self) -> None:
        inner = [request.inner for request in self._open.values()]
        self._llm.abort_request(inner, internal=True)
        # Those of which only vLLM's core knows: it was interrupted while it took them in.
        self._core.abort_requests(list(self._core.scheduler.requests))
        self._open = {}
        # What a forward has left for the draws that did not follow.
        self._runner.execute_model_state = None
        for _ in range(_MOST_STEPS_TO_SETTLE):
            if not self._busy():
                return
            self._llm.step()
        raise EngineError(f"it goes on after {_MOST_STEPS_TO_SETTLE} steps")

    def _busy(self) -> bool:
        return bool(self._core.scheduler.has_requests() or self._core.batch_queue)

    def _spoiled(self, why: str) -> EngineError:
        return EngineError(
            f"cannot use vLLM any more: it was interrupted in the middle of a step and could not be set right ({why}); "
            "start the same command again, checkpoints are not affected"
        )

    def _add(self, requests: Sequence[Request], sampling: Sampling) -> None:
        self._draws.begin(top_k=sampling.top_k, top_p=sampling.top_p)
        keys = row_keys(sampling.seed, [request.key for request in requests]).tolist()
        params = self._params(sampling, None)
        for index, (request, key) in enumerate(zip(requests, keys, strict=True)):
            if self._seeded:
                params = self._params(sampling, key >> 1)  # vLLM's seeds have a sign
            prompt = {"prompt_token_ids": list(request.token_ids)}
            inner = self._llm.add_request(str(index), prompt, params)
            self._draws.add(inner, key)
            self._open[str(index)] = _Open(key=request.key, inner=inner)

    def _params(self, sampling: Sampling, seed: int | None) -> SamplingParams:
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_new_tokens,
            # All ends are given by their ids, so that each of them is part of its answer.
            ignore_eos=True,
            stop_token_ids=sorted(self._ends(sampling)),
            seed=seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if sampling.stop else RequestOutputKind.FINAL_ONLY,
        )

    def _ends(self, sampling: Sampling) -> frozenset[int]:
        return self._end_ids | {*sampling.stop_token_ids}

    def _run(self, found: dict[int, Answer], sampling: Sampling, *, total: int) -> None:
        ends, stop = self._ends(sampling), None
        if sampling.stop:
            stop = StopStrings(stop=sampling.stop, tokenizer=self._tokenizer, rows=total)
        watch = _Watch(self._deadline)
        while self._open:
            before = len(found)
            for output in self._llm.step():
                self._take(output, found, ends, stop)
            if len(found) > before:
                self._emit(Progress(what="answers", done=len(found), total=total))
            elif watch.stuck(self._progress):
                raise self._stuck()

    def _take(self, output: Any, found: dict[int, Answer], ends: frozenset[int], stop: StopStrings | None) -> None:
        request = self._open.get(output.request_id)
        if request is None:
            return  # ended by a stop string; this was on its way
        index, (came,) = int(output.request_id), output.outputs
        for token, logprob in zip(came.token_ids, came.logprobs.logprobs, strict=True):
            request.token_ids.append(token)
            request.logprobs.append(logprob)
            if stop is not None and token not in ends and stop.completes(index, token):
                self._llm.abort_request([request.inner], internal=True)
                self._close(index, StopReason.STOP, found)
                return
        if came.finish_reason is not None:
            ended = request.token_ids[-1] in ends
            if not ended and came.finish_reason != "length":
                raise EngineError(
                    f"cannot answer request {request.key}: vLLM ended it with {came.finish_reason!r} after "
                    f"{len(request.token_ids)} tokens; look into its log, with VLLM_LOGGING_LEVEL=INFO"
                )
            self._close(index, StopReason.EOS if ended else StopReason.LENGTH, found)

    def _close(self, index: int, reason: StopReason, found: dict[int, Answer]) -> None:
        request = self._open.pop(str(index))
        found[index] = Answer(token_ids=request.token_ids, logprobs=request.logprobs, stop_reason=reason)

    def _progress(self) -> tuple[int, ...]:
        """What changes with every step that computes something."""
        running = self._core.scheduler.running
        return (len(self._open), len(running), sum(request.num_computed_tokens for request in running))

    def _stuck(self) -> EngineError:
        first = next(iter(self._open.values()))
        return EngineError(
            f"cannot answer request {first.key}: vLLM computed no token in {self._deadline:.0f} s, with "
            f"{len(self._open)} answers to go; raise engine.kv_memory, or engine.deadline if that is too short"
        )


class _Watch:
    """Whether something has not changed for too long. It is asked about once a second."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._seen: tuple[int, ...] = ()
        self._since = self._looked = time.monotonic()

    def stuck(self, progress: Any) -> bool:
        """`progress()` tells what should change."""
        now = time.monotonic()
        if now - self._looked < min(_LOOKS_EVERY, self._deadline):
            return False
        self._looked, seen = now, progress()
        if seen != self._seen:
            self._seen, self._since = seen, now
        return now - self._since >= self._deadline
