"""Whether a server answers from the weights that were staged for it, found out by asking.

A server that keeps no checksums is trusted with loading what lies in a folder, but not blindly: before a version is
served, its log-probs of some tokens are compared with those of a forward on the CPU, over the very file that it
was given. That finds weights that did not arrive, caches that were kept, another model, another rope; it does not find
a difference smaller than the noise between kernels.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tidemill.contracts.engine import Request, Sampling
from tidemill.engines.remote.dialect import Dialect, ServerAnswer
from tidemill.errors import WeightSyncError
from tidemill.models.naming import model_naming
from tidemill.models.skeleton import computed_buffers, model_skeleton

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NoReference", "Probe", "Reference", "check_log_probs"]

# One prompt longer than a cache block of any engine, so that a prefix kept from old weights would be used.
_LENGTHS = (5, 160)
_NEW = 8
_WARM = 1.7
_SHARE = 0.02  # nats by which a log-prob may miss one that is known

Ask = Callable[[Request, Sampling], ServerAnswer]


def check_log_probs(ask: Ask, *, dialect: Dialect, vocabulary: int, named: str) -> None:
    """Raises WeightSyncError unless log-probs are of the distribution that is sampled from, over `vocabulary` ids."""
    sampling, known = dialect.known(vocabulary)
    prompt = _prompt(_LENGTHS[0], vocabulary, vocabulary)
    answer = ask(Request(key="probe/known", token_ids=prompt), sampling)
    if abs(answer.logprobs[0] - known) > _SHARE:
        raise WeightSyncError(
            f"{named} does not report log-probs of the distribution that it samples from: at temperature "
            f"{sampling.temperature:g} with top_k = {sampling.top_k} it said {answer.logprobs[0]:.3f} of a token that "
            f"has {known:.3f} among {vocabulary} ids; {dialect.advice}, and check that it serves this model"
        )


class Reference:
    """The model of `folder` on the CPU, over weights that are filled elsewhere, by Hugging Face name.

    Nothing is copied but what the model joins: the experts of a layer.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._model = model_skeleton(folder, dtype)
        self._naming = model_naming(self._model)
        self._dtype = dtype
        self._joined: dict[str, Tensor] = {}
        self._filled = False
        self._lock = threading.Lock()

    def logprobs(
        self, weights: "Mapping[str, Tensor]", prompt: Sequence[int], answer: Sequence[int], *, temperature: float
    ) -> list[float]:
        """Of each id of `answer`, in nats, in float32, by one forward; 0 is untempered."""
        with self._lock, torch.inference_mode():
            if not self._filled:
                self._fill(weights)
            for name, tensor in self._joined.items():
                for piece, view in self._naming.split(name, tensor):
                    view.copy_(weights[piece])
            logits = self._model(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0].float()
        rows = (logits / (temperature or 1.0)).log_softmax(-1)[len(prompt) - 1 : -1]
        return [float(row[token]) for row, token in zip(rows, answer, strict=True)]

    def _fill(self, weights: "Mapping[str, Tensor]") -> None:
        """Put `weights` where the model has tensors without memory; later versions are written into the same."""
        made: dict[int, torch.nn.Parameter] = {}
        for name, parameter in self._model.named_parameters():
            (first, *rest) = self._naming.cuts(name)
            whole = not rest and first.shape == tuple(parameter.shape)
            tensor = weights[first.name] if whole else torch.empty(parameter.shape, dtype=self._dtype)
            if not whole:
                self._joined[name] = tensor
            made[id(parameter)] = torch.nn.Parameter(tensor, requires_grad=False)
        buffers = computed_buffers(self._model)
        for path, module in self._model.named_modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, made[id(parameter)])
            for name, _ in list(module.named_buffers(recurse=False)):
                setattr(module, name, buffers[f"{path}.{name}"])
        self._filled = True


class Probe:
    """Compares servers with a `Reference`; `tolerance` bounds the mean difference over all tokens, in nats."""

    def __init__(self, reference: Reference, *, vocabulary: int, tolerance: float) -> None:
        self._reference, self._vocabulary, self._tolerance = reference, vocabulary, tolerance

    def check(self, ask: Ask, weights: "Mapping[str, Tensor]", *, named: str, version: str) -> float:
        """The mean difference in nats. Raises WeightSyncError when it is more than is allowed."""
        differences: list[float] = []
        for length, temperature in ((_LENGTHS[0], 0.0), (_LENGTHS[1], 0.0), (_LENGTHS[0], _WARM)):
            prompt = _prompt(length, self._vocabulary, length)
            request = Request(key=f"probe/{length}", token_ids=prompt)
            answer = ask(request, Sampling(max_new_tokens=_NEW, temperature=temperature))
            expected = self._reference.logprobs(weights, prompt, answer.token_ids, temperature=temperature)
            differences += [abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True)]
        mean = sum(differences) / len(differences)
        if not mean <= self._tolerance:
            raise WeightSyncError(
                f"{named} does not answer from version {version}: log-probs of {len(differences)} probe tokens differ "
                f"by {mean:.3f} nats on average from a forward over the weights that it was given, and "
                f"{self._tolerance:g} is allowed; it serves other weights, or raise engine.probe_tolerance if its "
                "kernels differ that much"
            )
        return mean


class NoReference:
    """Trusts the servers."""

    def check(self, ask: Ask, weights: "Mapping[str, Tensor]", *, named: str, version: str) -> float:
        """Nothing is asked."""
        return 0.0


def _prompt(length: int, vocabulary: int, salt: int) -> tuple[int, ...]:
    """Fixed ids, of no meaning."""
    return tuple((7919 * (position + 1) + 104729 * salt) % vocabulary for position in range(length))
