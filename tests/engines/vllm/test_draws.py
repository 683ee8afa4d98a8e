from types import SimpleNamespace

import numpy as np
import torch

from tidemill.engines.common.sampling import draw, row_keys, uniforms
from tidemill.engines.vllm.draws import CountedDraws, OwnDraws


class Runner:
    """As much of vLLM's model runner as the draws look at: rows with prompts, and lengths behind this step."""

    def __init__(self, rows: list[str], prompts: list[int], lengths: list[int]) -> None:
        self.native: list[int] = []
        self.input_batch = SimpleNamespace(req_ids=rows, num_prompt_tokens=np.array(prompts))
        self.optimistic_seq_lens_cpu = torch.tensor(lengths, dtype=torch.int32)
        self.sampler = SimpleNamespace(topk_topp_sampler=SimpleNamespace(forward=self.forward))

    def forward(self, logits, generators, k, p):
        self.native.append(len(logits))
        return logits.argmax(-1), None


def test_a_row_draws_by_its_key_and_its_place_whatever_row_it_is() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 50)
    keys = row_keys(7, ["a", "b", "c"])
    every = torch.from_numpy(uniforms(keys, 10))
    runner = Runner(["c-1", "a-1", "b-1"], prompts=[4, 100, 6], lengths=[4, 109, 9])
    draws = CountedDraws(runner)
    draws.begin(top_k=5, top_p=0.9)
    for name, key in zip(["a-1", "b-1", "c-1"], keys.tolist(), strict=True):
        draws.add(name, key)
    tokens, logprobs = runner.sampler.topk_topp_sampler.forward(logits.clone(), {}, None, None)
    uniform = torch.stack([every[2, 0], every[0, 9], every[1, 3]])
    expected, chosen = draw(logits, uniform, temperature=1.0, top_k=5, top_p=0.9)
    assert torch.equal(tokens, expected)
    assert torch.equal(logprobs.gather(1, tokens[:, None])[:, 0], chosen)
    assert bool(((logprobs > -torch.inf).sum(-1) <= 5).all())
    assert runner.native == []


def test_a_row_within_its_prompt_draws_something_that_is_thrown_away() -> None:
    runner = Runner(["a-1"], prompts=[100], lengths=[40])
    draws = CountedDraws(runner)
    draws.begin(top_k=0, top_p=1.0)
    draws.add("a-1", 3)
    assert len(draws.forward(torch.zeros(1, 4), {}, None, None)[0]) == 1


def test_rows_that_are_none_of_ours_are_drawn_by_vllm() -> None:
    runner = Runner([], prompts=[], lengths=[])
    CountedDraws(runner)
    runner.sampler.topk_topp_sampler.forward(torch.zeros(2, 4), {}, None, None)
    assert runner.native == [2]


def test_the_second_runners_own_draws_need_nothing() -> None:
    draws = OwnDraws()
    draws.begin(top_k=0, top_p=1.0)
    draws.add("a", 1)
