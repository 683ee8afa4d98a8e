"""What kinds of servers have in common: how each is asked, and what its answers say.

A dialect holds no state: it turns requests into bodies and answers into values, and knows by which calls a server
sleeps, wakes and takes weights. All answers are checked by `checked_answer`, whatever the server.
"""

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from tidemill.contracts.engine import Request, Sampling
from tidemill.contracts.footprint import Part
from tidemill.contracts.sample import StopReason
from tidemill.engines.remote.client import Client, ServerFailed

__all__ = ["ServerAnswer", "Dialect", "Served", "checked_answer", "request_seed"]

# A log-prob is at most 0; float32 sums of a softmax miss it by this much.
_ABOVE_ZERO = 1e-3


@dataclass(frozen=True, kw_only=True)
class ServerAnswer:
    """What a server sampled; `stop_reason` is STOP for an end by an id too.

    `stamp` is the version that it names in its answer, empty where it names none.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: StopReason
    stamp: str = ""


@dataclass(frozen=True, kw_only=True)
class Served:
    """What a server says of its model. Zeros and empty texts stand for what it does not tell."""

    name: str
    context: int = 0
    kind: str = ""
    token_ids: tuple[int, ...] = ()


class Dialect(Protocol):
    """How one kind of server is spoken to. `aliased` servers want tied weights under each of their names; `advice` says
    how to start one so that it reports log-probs of what it samples from.

    All calls raise what `Client.call` raises.
    """

    name: str
    aliased: bool
    advice: str

    def check_sampling(self, sampling: Sampling) -> None:
        """Raises EngineError for what the server's log-probs would be wrong for."""
        ...

    def known(self, vocabulary: int) -> tuple[Sampling, float]:
        """A sampling of one token whose log-prob, in nats, does not depend on weights or prompt."""
        ...

    def path(self) -> str:
        """Where to ask for answers."""
        ...

    def body(
        self, request: Request, sampling: Sampling, *, ends: Sequence[int], seed: int | None, model: str
    ) -> Mapping[str, Any]:
        """What to ask there. `ends` are the ids that end an answer, those of `sampling` included."""
        ...

    def answer(self, said: Any) -> ServerAnswer:
        """What came back, unchecked. Raises KeyError, TypeError, ValueError or IndexError for another shape."""
        ...

    def healthy(self, client: Client, *, deadline: float) -> None:
        """Returns when the server is well; a server that is asleep or busy is."""
        ...

    def served(self, client: Client, *, text: str, deadline: float) -> Served:
        """What is behind the address, and the ids of `text` by its tokenizer."""
        ...

    def stamp(self, client: Client, *, deadline: float) -> str:
        """Names the weights in the server, or at least the process that holds them: changes when either does."""
        ...

    def load(self, client: Client, *, folder: Path, stamp: str, deadline: float) -> str:
        """Let the server take the weights in `folder` and drop its caches; the stamp that it has then.

        Nothing is answered from the old weights after it.
        """
        ...

    def awake(self, client: Client, *, deadline: float) -> Part:
        """What a server has on its device that nobody here has put to sleep yet."""
        ...

    def sleep(self, client: Client, awake: Part, *, deadline: float) -> None:
        """Give all device memory back, without a copy. `awake` is what it has: servers stumble over less than all."""
        ...

    def wake_up(self, client: Client, part: Part, *, deadline: float) -> None:
        """Take the device memory of `part`, the weights' without content."""
        ...


def request_seed(seed: int, key: str) -> int:
    """In [0, 2^31): what servers take. Equal for equal `seed` and `key`."""
    digest = hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def checked_answer(
    dialect: Dialect,
    said: Any,
    *,
    sampling: Sampling,
    vocabulary: int,
    ends: Collection[int],
    named: str,
    key: str,
) -> ServerAnswer:
    """What the server `named` answered to the request `key`. Raises ServerFailed for what cannot be such an answer.

    A server that says one thing wrong is not asked again before it has its weights anew.
    """
    try:
        answer = dialect.answer(said)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ServerFailed(
            f"{named} answered request {key} in a form that {dialect.name} has not ({type(error).__name__}: {error}); "
            f"is it a {dialect.name} server, with token ids and log-probs in its answers?"
        ) from None
    stops = frozenset(ends).union(sampling.stop_token_ids)
    if wrong := _wrong(answer, sampling=sampling, vocabulary=vocabulary, stops=stops):
        raise ServerFailed(f"{named} answered request {key} with {wrong}")
    # Servers differ in what they call an end that is one by two rules at once.
    return replace(answer, stop_reason=StopReason.EOS) if answer.token_ids[-1] in stops else answer


def _wrong(answer: ServerAnswer, *, sampling: Sampling, vocabulary: int, stops: frozenset[int]) -> str:
    """What an answer of this sampling cannot have, in words; empty when nothing is amiss."""
    ids, logprobs, reason = answer.token_ids, answer.logprobs, answer.stop_reason
    if reason == StopReason.ABORTED:
        return "an end that somebody else asked for: it was aborted"
    if not ids or len(ids) > sampling.max_new_tokens:
        return f"{len(ids)} tokens where {sampling.max_new_tokens} were asked for at most, and one at least"
    if len(ids) != len(logprobs):
        return f"{len(ids)} tokens and {len(logprobs)} log-probs"
    outside = [token for token in ids if not 0 <= token < vocabulary]
    if outside:
        return f"the token id {outside[0]}, where the model has {vocabulary}"
    bad = [value for value in logprobs if not (math.isfinite(value) and value <= _ABOVE_ZERO)]
    if bad:
        return f"a log-prob of {bad[0]}"
    early = [token for token in ids[:-1] if token in stops]
    if early:
        return f"tokens behind the ending id {early[0]}"
    if ids[-1] in stops:
        return ""
    if reason == StopReason.LENGTH and len(ids) != sampling.max_new_tokens:
        return f"{len(ids)} tokens, cut where {sampling.max_new_tokens} were asked for"
    if reason == StopReason.STOP and not sampling.stop:
        return f"an end by the id {ids[-1]}, which ends no answer according to the model folder"
    return ""
