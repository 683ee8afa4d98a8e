"""Tokens a second of the transformers engine, against a bare loop and transformers' own `generate`, in one run.

Case `short-answers`: Qwen3 of 0.8M parameters (4 layers, hidden 128), 32 prompts of 40 tokens, 64 new tokens. Case
`quickstart`: the quick start's rollout, 64 prompts of 9 tokens, 9 new tokens. The arms take turns (A B C A B C); the
first round is reported as `first`, the others as their median. `verified` says that the engine's log-probs equal those
of a full forward within 1e-4 nats; the other arms are as they are.

    OMP_NUM_THREADS=2 python -m benchmarks.generate [--rounds 7] [--json FILE]
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from tidemill.contracts.engine import Request, Sampling
from tidemill.contracts.events import ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.state import PolicyVersion
from tidemill.engines.transformers.engine import TransformersEngine
from tidemill.testing.tiny import make_tiny_model

CASES = {"short-answers": (4, 32, 40, 64), "quickstart": (2, 64, 9, 9)}


def arms(folder: Path, prompts: list[list[int]], new: int) -> tuple[dict[str, Callable[[], object]], bool]:
    """What is timed, by name, and whether the engine's log-probs are right."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor(prompts)
    rows = len(prompts)
    engine = TransformersEngine(model=folder, device="cpu", dtype="float32", max_batch=rows, emit=ignore)
    engine.wake_up(Part.ALL)
    engine.gate.open(Part.ALL)
    engine.load_pretrained(PolicyVersion(1, 0))
    requests = [Request(key=str(row), token_ids=tuple(prompt)) for row, prompt in enumerate(prompts)]
    sampling = Sampling(max_new_tokens=new)

    @torch.inference_mode()
    def bare() -> None:
        cache = DynamicCache(config=model.config)
        logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        for position in range(new):
            logprobs = logits[:, -1].float().log_softmax(-1)
            token = torch.multinomial(logprobs.exp(), 1)
            logprobs.gather(1, token)
            if position + 1 < new:
                logits = model(token, past_key_values=cache, use_cache=True).logits

    def generate() -> None:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=new,
            min_new_tokens=new,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )

    answers = engine.generate(requests, sampling)
    with torch.inference_mode():
        full = model(torch.tensor([[*p, *a.token_ids] for p, a in zip(prompts, answers, strict=True)])).logits
    chosen = torch.tensor([answer.token_ids for answer in answers])[..., None]
    expected = full.log_softmax(-1)[:, len(prompts[0]) - 1 : -1].gather(-1, chosen)[..., 0]
    error = (expected - torch.tensor([answer.logprobs for answer in answers])).abs().max()
    timed = {"tidemill": lambda: engine.generate(requests, sampling), "bare-loop": bare, "transformers": generate}
    return timed, bool(error < 1e-4)


def without_end(folder: Path) -> None:
    """Make the model know no end, so that every arm makes the same number of tokens."""
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        kept = {key: value for key, value in content.items() if key not in ("eos_token_id", "eos_token")}
        (folder / name).write_text(json.dumps(kept))


def measure(case: str, rounds: int, folder: Path) -> list[dict[str, object]]:
    """JSON lines of one case."""
    layers, rows, length, new = CASES[case]
    make_tiny_model(folder, layers=layers, kv_heads=2 if case == "short-answers" else 4)
    without_end(folder)
    prompts = [[(7 * row + column) % 60 + 4 for column in range(length)] for row in range(rows)]
    timed, verified = arms(folder, prompts, new)
    rates: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds + 1):
        for name, arm in timed.items():
            began = time.perf_counter()
            arm()
            rates[name].append(rows * new / (time.perf_counter() - began))
    lines: list[dict[str, object]] = []
    for cycle, of in (("first", lambda found: found[0]), ("median", lambda found: statistics.median(found[1:]))):
        for name, found in rates.items():
            right = verified if name == "tidemill" else True
            shared = {"benchmark": "generate", "arm": name, "case": case, "cycle": cycle, "verified": right}
            lines.append({**shared, "metric": "rate", "value": round(of(found)), "unit": "tokens/s"})
            # Of the same round: neighbours in time share whatever else the machine is doing.
            ratios = [rate / base for rate, base in zip(found, rates["bare-loop"], strict=True)]
            lines.append({**shared, "metric": "ratio", "value": round(of(ratios), 3), "unit": "of bare loop"})
    return lines


def main(arguments: list[str]) -> int:
    """Exit code 1 when something is not verified."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    lines = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            lines += measure(case, options.rounds, Path(folder))
    text = "\n".join(json.dumps(line) for line in lines)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    print(f"\n{'case':<16}{'arm':<16}{'tokens/s':>10}{'of bare loop':>14}")
    medians = [line for line in lines if line["cycle"] == "median"]
    for rate, ratio in zip(medians[::2], medians[1::2], strict=True):
        print(f"{rate['case']:<16}{rate['arm']:<16}{rate['value']:>10}{ratio['value']:>14}")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads")
    return 0 if all(line["verified"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
