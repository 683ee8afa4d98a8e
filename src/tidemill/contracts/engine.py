"""The one who answers prompts at a known policy version."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tidemill.contracts.sample import StopReason
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.weights import WeightReceiver

__all__ = ["Completion", "Generate", "Request", "RolloutEngine", "Sampling"]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to sample. `temperature` 0 is greedy, with log-probs untempered. `top_k` 0 and `top_p` 1 keep every token.

    `stop` strings end an answer at the token that completes one. `stop_token_ids` end it besides the model's own
    end-of-sequence ids. `seed` and a request's `key` determine every draw.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One answer wanted. `key` is unique within a run: equal seed, key and weights give equal answers."""

    key: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One answer: ids sampled (the ending id included, nothing after it) and the log-prob of each, nats, float32.

    Log-probs are those of the distribution sampled from: at the temperature, and renormalised over what top-k and
    top-p kept.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: StopReason
    version: PolicyVersion
    text: str


Generate = Callable[[Sequence[Request]], list[Completion]]


class RolloutEngine(WeightReceiver, Protocol):
    """`generate` needs the lease for everything; the weight methods need `Part.WEIGHTS`."""

    def load_pretrained(self, version: PolicyVersion) -> None:
        """Hold the weights of the model folder itself as `version`: a whole update without a trainer.

        Raises DataError when the folder has no such weights, and as `load_weights` and `publish` do.
        """
        ...

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Completions in the order of the requests.

        Raises ResidencyError without a lease, WeightSyncError when the version is unknown, EngineError when a prompt
        and its answer cannot fit the model's context.
        """
        ...
