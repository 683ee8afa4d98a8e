"""What the engine takes while it generates is never more than was planned (`tidemill.planning.generation`)."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.planning.test_memory_of_passes import peak_bytes
from tests.planning.test_plan import QWEN3_1_7B as QWEN3

from tidemill.contracts.engine import Request, Sampling
from tidemill.contracts.events import ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.state import PolicyVersion
from tidemill.engines.transformers.engine import TransformersEngine
from tidemill.planning.decoder import decoder_of
from tidemill.planning.generation import Generation, working_bytes
from tidemill.planning.state import cache_bytes
from tidemill.testing.tiny import make_tiny_model


@pytest.mark.parametrize(("prompt", "new"), [(200, 8), (8, 200)])
def test_generating_takes_at_most_what_was_planned(tmp_path: Path, prompt: int, new: int) -> None:
    folder = make_tiny_model(tmp_path / "model", hidden=64, layers=3, heads=4, kv_heads=2)
    engine = TransformersEngine(model=folder, device="cpu", dtype="float32", max_batch=8, emit=ignore)
    engine.wake_up(Part.ALL)
    engine.gate.open(Part.ALL)
    engine.load_pretrained(PolicyVersion(1, 0))
    requests = [Request(key=str(row), token_ids=tuple(range(4, 4 + prompt // 4 - row)) * 4) for row in range(8)]
    if prompt < 16:
        requests = [Request(key=str(row), token_ids=(5,) * (prompt - row % 2)) for row in range(8)]
    sampling = Sampling(max_new_tokens=new, temperature=0.7, seed=0)
    taken = peak_bytes(lambda: engine.generate(requests, sampling))
    decoder = decoder_of(json.loads((folder / "config.json").read_text()))
    generation = Generation(rows=8, prompt=prompt, new=new, itemsize=4)
    cache = cache_bytes(decoder, positions=generation.positions, itemsize=4)
    planned = cache + working_bytes(decoder, generation, cache=cache)
    assert taken <= planned <= 3 * taken


def test_a_paged_cache_has_a_page_more_for_each_answer_and_none_of_it_is_copied_or_masked() -> None:
    plain = Generation(rows=8, prompt=100, new=29, itemsize=2)
    paged = replace(plain, paged=True)
    assert plain.positions == 8 * 129
    assert paged.positions == (65 + 8 + 1) * 16
    decoder = decoder_of(QWEN3)
    cache = cache_bytes(decoder, positions=paged.positions, itemsize=2)
    assert working_bytes(decoder, paged, cache=cache) < working_bytes(decoder, plain, cache=cache)


def test_prompts_that_vllm_computes_at_once_are_bounded() -> None:
    decoder = decoder_of(QWEN3)
    taken = [
        working_bytes(decoder, Generation(rows=rows, prompt=4096, new=8, itemsize=2, paged=True), cache=0)
        for rows in (4, 64)
    ]
    assert taken[0] == taken[1]
