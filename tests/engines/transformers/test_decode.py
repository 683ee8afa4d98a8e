from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tidemill.contracts.engine import Sampling
from tidemill.contracts.sample import StopReason
from tidemill.engines.common.sampling import draw, row_keys, uniforms
from tidemill.engines.common.stopping import NoStopStrings, StopStrings
from tidemill.engines.transformers.decode import Answer, decode
from tidemill.testing.tiny import make_tiny_model, make_tiny_tokenizer

NEW, ROWS = 14, 14


def naive(model, prompt, uniform, sampling, ends, tokenizer) -> Answer:
    """The slow twin: one row, no cache, everything decoded at each token."""
    ids, logprobs = list(prompt), []
    while len(logprobs) < sampling.max_new_tokens:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[:, -1]
        token, logprob = draw(
            logits,
            torch.tensor([uniform[len(logprobs)]]),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
        ids.append(int(token))
        logprobs.append(float(logprob))
        answer = ids[len(prompt) :]
        if ends[ids[-1]]:
            return Answer(token_ids=answer, logprobs=logprobs, stop_reason=StopReason.EOS)
        if any(stop in tokenizer.decode(answer, skip_special_tokens=True) for stop in sampling.stop):
            return Answer(token_ids=answer, logprobs=logprobs, stop_reason=StopReason.STOP)
    return Answer(token_ids=ids[len(prompt) :], logprobs=logprobs, stop_reason=StopReason.LENGTH)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 8},
        {"top_p": 0.5},
        {"stop": ("a", "q", "Z", "\n", "=")},
        {"stop": ("a", "b"), "top_k": 20, "top_p": 0.9},
    ],
)
def test_a_batch_gives_what_one_row_at_a_time_without_a_cache_gives(tmp_path: Path, ragged, settings) -> None:
    folder = make_tiny_model(tmp_path, hidden=32, heads=2, kv_heads=1)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), make_tiny_tokenizer()
    sampling = Sampling(max_new_tokens=NEW, **settings)
    prompts = [
        [(5 * row + 3 * column) % 90 + 4 for column in range(3 + (row % 7 if ragged else 2))] for row in range(ROWS)
    ]
    drawn = uniforms(row_keys(0, [str(row) for row in range(ROWS)]), NEW)
    ends = torch.zeros(model.config.vocab_size, dtype=torch.bool)
    ends[range(2, 12)] = True
    if settings.get("stop"):
        watcher = StopStrings(stop=sampling.stop, tokenizer=tokenizer, rows=ROWS)
    else:
        watcher = NoStopStrings(rows=ROWS)
    answers = decode(model, prompts, uniforms=drawn, sampling=sampling, ends=ends, stop=watcher)
    expected = [
        naive(model, prompt, row, sampling, ends.tolist(), tokenizer)
        for prompt, row in zip(prompts, drawn, strict=True)
    ]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert [answer.stop_reason for answer in answers] == [answer.stop_reason for answer in expected]
    assert len({answer.stop_reason for answer in answers}) == (3 if settings.get("stop") else 2)
    for answer, slow in zip(answers, expected, strict=True):
        assert answer.logprobs == pytest.approx(slow.logprobs, abs=1e-5)
    assert max(len(answer.token_ids) for answer in answers) > 1


def test_the_model_is_asked_for_no_more_tokens_than_needed(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, hidden=32, heads=2, kv_heads=1)).eval()
    rows = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    ends = torch.zeros(model.config.vocab_size, dtype=torch.bool)
    drawn = np.full((4, 6), 0.5)
    ask = {"uniforms": drawn, "sampling": Sampling(max_new_tokens=6)}
    decode(model, [[5, 6]] * 4, **ask, ends=ends, stop=NoStopStrings(rows=4))
    assert rows == [4] * 6
    rows.clear()
    decode(model, [[5, 6]] * 4, **ask, ends=~ends, stop=NoStopStrings(rows=4))
    assert rows == [4]
