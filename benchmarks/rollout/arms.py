"""Who generates, each in a process of its own: our engines, and what they stand on without us.

A process builds its arm once and is then asked for rounds. `tidemill` is the engine class that a run uses; the others
are a loop of twenty lines and `generate` for transformers, `LLM.generate` for vLLM, at the same options.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.rollout.cases import Case, prompts_of
from tidemill.contracts.engine import Request, Sampling
from tidemill.contracts.events import ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.state import PolicyVersion

__all__ = ["ARMS", "Place", "serve"]

Generate = Callable[[list[list[int]]], list[tuple[list[int], list[float]]]]
"""From prompts to ids and log-probs of each answer."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a model lies, and how it is computed. `cache_bytes` are for keys and values, where an engine asks."""

    folder: Path
    device: str
    dtype: str
    cache_bytes: int


def ours(engine: Any, case: Case) -> Generate:
    """An engine class of ours, awake, with the folder's weights."""
    engine.wake_up(Part.ALL)
    engine.gate.open(Part.ALL)
    engine.load_pretrained(PolicyVersion(1, 0))
    turn = 0

    def generate(prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        nonlocal turn
        turn += 1
        requests = [Request(key=f"{turn}:{row}", token_ids=tuple(prompt)) for row, prompt in enumerate(prompts)]
        answers = engine.generate(requests, Sampling(max_new_tokens=case.new))
        return [(list(answer.token_ids), list(answer.logprobs)) for answer in answers]

    return generate


def our_transformers(place: Place, case: Case) -> Generate:
    """TransformersEngine."""
    from tidemill.engines.transformers.engine import TransformersEngine

    tokens = case.rows * (case.length + case.new)
    shared: dict[str, Any] = {"model": place.folder, "device": place.device, "dtype": place.dtype, "emit": ignore}
    return ours(TransformersEngine(**shared, max_batch=case.rows, kv_tokens=tokens), case)


def our_vllm(place: Place, case: Case) -> Generate:
    """VllmEngine."""
    from tidemill.engines.vllm.engine import VllmEngine

    shared: dict[str, Any] = {"model": place.folder, "device": place.device, "dtype": place.dtype, "emit": ignore}
    return ours(VllmEngine(**shared, max_batch=case.rows, kv_memory=place.cache_bytes), case)


def _model(place: Place) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(place.folder, dtype=getattr(torch, place.dtype))
    return model.to(place.device).eval()


def bare_loop(place: Place, case: Case) -> Generate:
    """The plainest loop over a transformers model that samples and has log-probs."""
    from transformers import DynamicCache

    model = _model(place)

    @torch.inference_mode()
    def generate(prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        cache = DynamicCache(config=model.config)
        tokens, logprobs = [], []
        logits = model(
            torch.tensor(prompts, device=place.device), past_key_values=cache, use_cache=True, logits_to_keep=1
        ).logits
        for position in range(case.new):
            known = logits[:, -1].float().log_softmax(-1)
            tokens.append(torch.multinomial(known.exp(), 1))
            logprobs.append(known.gather(1, tokens[-1]))
            if position + 1 < case.new:
                logits = model(tokens[-1], past_key_values=cache, use_cache=True).logits
        return list(zip(torch.cat(tokens, 1).tolist(), torch.cat(logprobs, 1).tolist(), strict=True))

    return generate


def bare_transformers(place: Place, case: Case) -> Generate:
    """`generate`, with the logits from which log-probs could be taken; it takes none."""
    model = _model(place)

    @torch.inference_mode()
    def generate(prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        ids = torch.tensor(prompts, device=place.device)
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=case.new,
            min_new_tokens=case.new,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return [(row, []) for row in found.sequences[:, ids.shape[1] :].tolist()]

    return generate


def bare_vllm(place: Place, case: Case) -> Generate:
    """`LLM.generate`, with the log-prob of each token, and text, as it makes it unless told otherwise."""
    from tidemill.engines.vllm.environment import import_vllm

    import_vllm(ignore)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(place.folder),
        dtype=place.dtype,
        seed=0,
        generation_config="vllm",
        max_num_seqs=case.rows,
        kv_cache_memory_bytes=place.cache_bytes,
        gpu_memory_utilization=0.01,  # not looked at: the cache is given in bytes
        logprobs_mode="processed_logprobs",
        enforce_eager=place.device == "cpu",
        disable_log_stats=True,
    )
    params = SamplingParams(temperature=1.0, max_tokens=case.new, ignore_eos=True, logprobs=0)

    def generate(prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        asked: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = [output.outputs[0] for output in llm.generate(asked, params, use_tqdm=False)]
        return [
            (list(one.token_ids), [known[token].logprob for token, known in zip(one.token_ids, one.logprobs)])  # noqa: B905
            for one in found
        ]

    return generate


ARMS: dict[str, dict[str, Callable[[Place, Case], Generate]]] = {
    "transformers": {"tidemill": our_transformers, "bare-loop": bare_loop, "transformers": bare_transformers},
    "vllm": {"tidemill": our_vllm, "bare-vllm": bare_vllm},
}
"""By engine. The second is what the others are compared with."""


def serve(pipe: Connection, engine: str, arm: str, place: Place, case: Case) -> None:
    """Build, say so, and answer every number of a round with its seconds; the word `check` with an error in nats."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    generate = ARMS[engine][arm](place, case)
    pipe.send("ready")
    answers: list[tuple[list[int], list[float]]] = []
    prompts: list[list[int]] = []
    while True:
        asked = pipe.recv()
        if asked == "check":
            pipe.send(error_of(place, prompts, answers))
            continue
        prompts = prompts_of(case, asked)
        began = time.perf_counter()
        answers = generate(prompts)
        seconds = time.perf_counter() - began
        if [len(ids) for ids, _ in answers] != [case.new] * case.rows:
            raise AssertionError(f"{arm} made other numbers of tokens than {case.new} for each of {case.rows} rows")
        pipe.send(seconds)


@torch.inference_mode()
def error_of(
    place: Place, prompts: list[list[int]], answers: list[tuple[list[int], list[float]]], rows: int = 8
) -> float:
    """Mean difference of log-probs, in nats, from a whole forward of transformers in this dtype; NaN without any."""
    if not answers[0][1]:
        return float("nan")
    every = max(1, len(prompts) // rows)
    chosen = list(zip(prompts, answers, strict=True))[::every]
    model, errors = _model(place), []
    for prompt, (ids, logprobs) in chosen:
        logits = model(torch.tensor([[*prompt, *ids]], device=place.device)).logits[0, len(prompt) - 1 : -1]
        known = logits.float().log_softmax(-1).gather(1, torch.tensor(ids, device=place.device)[:, None])[:, 0]
        errors.append((known.cpu() - torch.tensor(logprobs)).abs())
    return float(torch.cat(errors).mean())
