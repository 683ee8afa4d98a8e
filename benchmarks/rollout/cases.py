"""What is generated: a model with random weights that knows no end, and prompts of one length."""

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.real_shape import write_model
from tidemill.testing.tiny import make_tiny_model

__all__ = ["CASES", "Case", "prompts_of", "write_case"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """`samples` answers of `new` tokens to each of `prompts` prompts of `length` tokens. `layers` of a tiny model, or a
    `shape` of `benchmarks.shapes`.
    """

    prompts: int
    length: int
    new: int
    samples: int = 1
    layers: int = 0
    kv_heads: int = 0
    shape: str = ""

    @property
    def rows(self) -> int:
        """Answers in a round."""
        return self.prompts * self.samples


CASES = {
    "short-answers": Case(prompts=32, length=40, new=64, layers=4, kv_heads=2),
    "quickstart": Case(prompts=64, length=9, new=9, layers=2, kv_heads=4),
    "groups": Case(prompts=8, samples=8, length=160, new=32, layers=2, kv_heads=2),
    "qwen3-0.6b": Case(prompts=32, samples=8, length=256, new=256, shape="qwen3-0.6b"),
    "qwen3-4b": Case(prompts=32, samples=8, length=256, new=256, shape="qwen3-4b"),
}
"""The first three run on a CPU in seconds; the others want a GPU."""


def write_case(folder: Path, case: Case) -> None:
    """The model's folder. It names no end, so that every engine makes the same number of tokens."""
    if case.shape:
        write_model(folder, case.shape)
    else:
        make_tiny_model(folder, layers=case.layers, kv_heads=case.kv_heads)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        kept = {key: value for key, value in content.items() if key not in ("eos_token_id", "eos_token")}
        (folder / name).write_text(json.dumps(kept))


def prompts_of(case: Case, turn: int) -> list[list[int]]:
    """One for each row, those of a group the same. Other ones each turn, so that no cache holds them already."""
    return [
        [(7 * (row // case.samples) + 11 * turn + 3 * column * column) % 60 + 4 for column in range(case.length)]
        for row in range(case.rows)
    ]
