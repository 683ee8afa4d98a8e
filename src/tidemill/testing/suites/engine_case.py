"""What the two suites for engines share: tiny models, a slow twin, and an engine under a lease.

`make_engine` is the one fixture to override. The suites make tiny models on the spot and hand their weights over by the
engine's own weight methods, so that they need neither a trainer nor a download.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tidemill.contracts.engine import Completion, Request, RolloutEngine, Sampling
from tidemill.contracts.footprint import Part
from tidemill.contracts.state import PolicyVersion
from tidemill.testing.tiny import EOS_ID, make_tiny_model, make_tiny_tokenizer, scripted_weights

__all__ = [
    "SECOND_EOS",
    "EngineCase",
    "MakeEngine",
    "Scripted",
    "close_asleep",
    "hand_over",
    "open_awake",
    "reference_logprobs",
    "requests_of",
    "weights_of",
]

MakeEngine = Callable[[Path], RolloutEngine]
Scripted = Callable[[str], tuple[RolloutEngine, Request]]
SECOND_EOS = 7


def open_awake(engine: RolloutEngine, part: Part = Part.ALL) -> None:
    """What a lease does: wake, then open the gate."""
    engine.wake_up(part)
    engine.gate.open(part)


def close_asleep(engine: RolloutEngine) -> None:
    """What an eviction does: close the gate, then sleep."""
    engine.gate.close(Part.ALL)
    engine.sleep()


def hand_over(engine: RolloutEngine, weights: Mapping[str, torch.Tensor], version: PolicyVersion) -> None:
    """A whole weight sync, unverified."""
    engine.begin_update()
    engine.load_weights(iter(weights.items()))
    engine.publish(version)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    """Parameters by name, tied ones once."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def requests_of(prompts: Sequence[Sequence[int]]) -> list[Request]:
    """Requests with keys `0:0#0`, `0:1#0` and so on."""
    return [Request(key=f"0:{index}#0", token_ids=tuple(prompt)) for index, prompt in enumerate(prompts)]


def reference_logprobs(model: Any, prompt: Sequence[int], answer: Sequence[int], temperature: float) -> list[float]:
    """The slow twin: one full forward over prompt and answer."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0].float() / (temperature or 1.0)
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return [float(row[token]) for row, token in zip(rows, answer, strict=True)]


class EngineCase:
    """Fixtures. `tolerance` is in nats: raise it for an engine whose kernels differ."""

    tolerance = 1e-4
    version = PolicyVersion(1, 0)
    prompts = tuple(tuple((7 * row + 3 * column) % 90 + 4 for column in range(2 + 5 * row)) for row in range(6))

    @pytest.fixture
    def make_engine(self) -> MakeEngine:
        """Override: a new engine in float32, asleep and empty, for the model folder that it is called with."""
        raise NotImplementedError("override the fixture make_engine")

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """A tied model whose distributions are far from flat, with heads of a size that all kernels know."""
        folder = make_tiny_model(tmp_path / "model", hidden=64, heads=2, kv_heads=1)
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4.0)
        model.save_pretrained(folder)
        return folder

    @pytest.fixture
    def model(self, folder: Path) -> Any:
        """The reference, loaded by transformers."""
        return AutoModelForCausalLM.from_pretrained(folder)

    @pytest.fixture
    def engine(self, make_engine: MakeEngine, folder: Path, model: Any) -> RolloutEngine:
        """Awake, leased, with the reference's weights."""
        engine = make_engine(folder)
        open_awake(engine)
        hand_over(engine, weights_of(model), self.version)
        return engine

    @pytest.fixture
    def scripted(self, make_engine: MakeEngine, tmp_path: Path) -> Scripted:
        """An engine that says a given text (no byte twice) and then ends with the model's second end id."""

        def make(text: str) -> tuple[RolloutEngine, Request]:
            folder = make_tiny_model(tmp_path / "scripted", tied=False, hidden=128, alphabet="bytes")
            path = folder / "generation_config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [EOS_ID, SECOND_EOS]}))
            ids = [*make_tiny_tokenizer("bytes")("|" + text)["input_ids"], SECOND_EOS, 20, 21]
            weights = scripted_weights(folder, dict(itertools.pairwise(ids)))
            engine = make_engine(folder)
            open_awake(engine)
            hand_over(engine, weights, self.version)
            return engine, Request(key="0:0#0", token_ids=(ids[0],))

        return make

    def answers(self, engine: RolloutEngine, sampling: Sampling) -> list[tuple[Request, Completion]]:
        """Requests for the suite's prompts, of unequal length, with their answers."""
        requests = requests_of(self.prompts)
        return list(zip(requests, engine.generate(requests, sampling), strict=True))

    def refuses(self, engine: RolloutEngine, error: type[Exception]) -> None:
        """Generation raises `error`."""
        with pytest.raises(error):
            engine.generate(requests_of(self.prompts), Sampling(max_new_tokens=2))
