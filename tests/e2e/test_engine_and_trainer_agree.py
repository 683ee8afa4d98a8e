"""The engine's log-probs of what it sampled are the trainer's, at every temperature, when updates change nothing."""

from pathlib import Path
from typing import Literal, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tidemill.algorithms.grpo import Grpo
from tidemill.contracts.batch import Batch
from tidemill.contracts.engine import Completion, Request, Sampling
from tidemill.contracts.events import ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.sample import Group, Prompt, Score, StopReason, Trajectory
from tidemill.contracts.state import PolicyVersion
from tidemill.contracts.workers import Place
from tidemill.engines.transformers.engine import TransformersEngine
from tidemill.residency.manager import LeaseManager
from tidemill.testing.tiny import Family, make_tiny_model
from tidemill.trainers.common.schedule import PhaseSettings
from tidemill.trainers.fsdp.trainer import FsdpTrainer
from tidemill.weights.checksum import checksums
from tidemill.weights.direct import DirectWeightSync

NO_LEARNING = PhaseSettings(
    lr=0.0,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.1,
    schedule="constant",
    warm_up_steps=0,
    min_ratio=0.0,
    total_steps=3,
)
PROMPTS = [
    Prompt(id=str(row), key=f"0:{row}", token_ids=tuple(range(5, 7 + 3 * row)), text="?", label=None)
    for row in range(4)
]
SAMPLES, NEW_TOKENS = 4, 12
TOLERANCE = 1e-4  # nats, float32


def grpo(temperature: float) -> Grpo:
    return Grpo(clip_low=0.2, clip_high=0.2, normalize_std=True, temperature=temperature)


class Pair:
    """Trainer and engine over one model, in a budget that has room for both."""

    def __init__(self, folder: Path, *, device: str = "cpu", dtype: Literal["float32", "bfloat16"] = "float32") -> None:
        self.trainer = FsdpTrainer(
            model=folder,
            place=Place(device=device),
            compute_dtype=dtype,
            tokens_per_micro_batch=128,
            minibatches=1,
            recompute=False,
            max_grad_norm=1.0,
            phases={"rl": NO_LEARNING},
            page_bytes=1 << 16,
            emit=ignore,
        )
        self.engine = TransformersEngine(model=folder, device=device, dtype=dtype, max_batch=8, emit=ignore)
        budget = self.trainer.footprint(Part.ALL) + self.engine.footprint(Part.ALL)
        self.residency = LeaseManager(budget=budget, emit=ignore, deadline=5.0)
        self.residency.admit(self.trainer)
        self.sync = DirectWeightSync(residency=self.residency, emit=ignore)
        with self.residency.awake(self.trainer):
            self.trainer.begin("rl")

    def hand_over(self, step: int) -> None:
        with self.residency.awake(self.trainer):
            self.sync.update_weights(self.trainer, self.engine, PolicyVersion(1, step))

    def groups(self, step: int, sampling: Sampling) -> list[Group]:
        """Sampled under the version of `step`; every second answer is worth 1."""
        requests = [Request(key=f"{p.key}#{n}", token_ids=p.token_ids) for p in PROMPTS for n in range(SAMPLES)]
        with self.residency.awake(self.engine):
            answers = iter(self.engine.generate(requests, sampling))
        groups = [
            Group(prompt=p, trajectories=tuple(answered(p, n, next(answers)) for n in range(SAMPLES))) for p in PROMPTS
        ]
        assert {one.version for group in groups for one in group.trajectories} == {PolicyVersion(1, step)}
        return groups

    def batch(self, step: int, temperature: float, *, claimed: float) -> Batch:
        """Answers sampled at a temperature, and packed as if that had been `claimed`."""
        sampling = Sampling(max_new_tokens=NEW_TOKENS, temperature=temperature, seed=step)
        return grpo(claimed).batch(self.groups(step, sampling))


def answered(prompt: Prompt, sample: int, answer: Completion) -> Trajectory:
    assert answer.stop_reason in (StopReason.EOS, StopReason.LENGTH)
    return Trajectory(
        prompt=prompt,
        sample=sample,
        token_ids=answer.token_ids,
        logprobs=answer.logprobs,
        loss_mask=(True,) * len(answer.token_ids),
        version=answer.version,
        stop_reason=answer.stop_reason,
        score=Score(value=float(sample % 2)),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose distributions are far from flat, so that a wrong temperature shows."""
    return sharpened(make_tiny_model(tmp_path_factory.mktemp("agree") / "model", hidden=32, heads=2, kv_heads=1))


def sharpened(folder: Path) -> Path:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_log_probs_of_sampled_tokens_agree_over_updates_at_learning_rate_zero(folder: Path, temperature: float) -> None:
    pair = Pair(folder)
    for step in range(3):
        pair.hand_over(step)
        batch = pair.batch(step, temperature, claimed=temperature)
        assert batch.loss_mask.sum() > len(PROMPTS) * SAMPLES * 2
        with pair.residency.awake(pair.trainer):
            again = pair.trainer.log_probs(batch)
            report = pair.trainer.step(batch, grpo(temperature).loss)
        assert np.abs(again - batch.logprobs)[batch.loss_mask].max() < TOLERANCE
        assert report.skipped == ""
        assert np.abs(report.logprobs - batch.logprobs)[batch.loss_mask].max() < TOLERANCE
        assert report.metrics["policy/ratio"] == pytest.approx(1.0, abs=TOLERANCE)
        assert report.metrics["policy/clip_fraction"] == 0.0
        assert report.metrics["policy/grad_norm"] > 0.0


@pytest.mark.parametrize("family", get_args(Family))
def test_every_kind_of_model_is_handed_over_and_speaks_in_the_engine_as_in_the_trainer(
    tmp_path: Path, family: Family
) -> None:
    """Names and bytes by checksum, then what is computed with them; answers outgrow the window of who has one."""
    pair = Pair(make_tiny_model(tmp_path / "model", family=family, hidden=32, heads=4, kv_heads=2))
    pair.hand_over(0)
    with pair.residency.awake(pair.trainer):
        assert {name for name, _ in pair.trainer.named_weights()} == pair.trainer.weight_specs().keys()
        specs = {name: shape for name, (_, shape) in pair.trainer.weight_specs().items()}
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert specs == {name: tuple(tensor.shape) for name, tensor in stored.items()}
    with pair.residency.awake(pair.engine):
        handed = dict(pair.engine.weight_checksums())
        pair.engine.load_pretrained(PolicyVersion(1, 1))
        assert pair.engine.weight_checksums() == handed == checksums(stored.items())
    batch = pair.batch(1, 1.0, claimed=1.0)
    assert np.diff(batch.offsets).max() > 16
    with pair.residency.awake(pair.trainer):
        again = pair.trainer.log_probs(batch)
    assert np.abs(again - batch.logprobs)[batch.loss_mask].max() < TOLERANCE


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "most"), [("float32", 2e-3), ("bfloat16", 0.1)])
@pytest.mark.parametrize("family", get_args(Family))
def test_every_kind_of_model_learns_and_speaks_on_a_gpu(
    tmp_path: Path, family: Family, dtype: Literal["float32", "bfloat16"], most: float
) -> None:
    """Twice from the same start: the same bits. Engine and trainer multiply in other shapes, and round otherwise."""
    folder = make_tiny_model(tmp_path / "model", family=family, hidden=128, heads=4, kv_heads=2)
    seen = []
    for _ in range(2):
        pair = Pair(folder, device="cuda", dtype=dtype)
        for step in range(2):
            pair.hand_over(step)
            batch = pair.batch(step, 1.0, claimed=1.0)
            with pair.residency.awake(pair.trainer):
                report = pair.trainer.step(batch, grpo(1.0).loss)
            assert report.metrics["policy/grad_norm"] > 0.0
            assert np.abs(report.logprobs - batch.logprobs)[batch.loss_mask].max() < most
        seen.append((batch.token_ids.tobytes(), report.logprobs.tobytes(), report.metrics["policy/grad_norm"]))
        pair.engine.sleep()
        pair.trainer.close()
    assert seen[0] == seen[1]


def test_an_update_at_learning_rate_zero_leaves_every_bit_of_the_engines_weights(folder: Path) -> None:
    pair = Pair(folder)
    seen = []
    for step in range(2):
        pair.hand_over(step)
        with pair.residency.awake(pair.engine):
            seen.append(dict(pair.engine.weight_checksums()))
        batch = pair.batch(step, 1.0, claimed=1.0)
        with pair.residency.awake(pair.trainer):
            pair.trainer.step(batch, grpo(1.0).loss)
    assert seen[0] == seen[1]


@pytest.mark.parametrize(("temperature", "claimed"), [(0.6, 1.0), (1.3, 1.0)])
def test_a_wrong_temperature_would_be_seen(folder: Path, temperature: float, claimed: float) -> None:
    pair = Pair(folder)
    pair.hand_over(0)
    batch = pair.batch(0, temperature, claimed=claimed)
    with pair.residency.awake(pair.trainer):
        again = pair.trainer.log_probs(batch)
    assert np.abs(again - batch.logprobs)[batch.loss_mask].max() > 100 * TOLERANCE
