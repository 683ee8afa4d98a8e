"""Every kind of model that the trainer knows goes through a whole run, and comes out as transformers reads it."""

import itertools
import json
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.crash.small_run import STEPS, prepare, recipe
from tests.crash.small_run import start as started
from tidemill.app.build import build_algorithm, build_trainer
from tidemill.checkpoint.catalog import newest
from tidemill.cli.main import main
from tidemill.config.load import load
from tidemill.contracts.batch import Batch
from tidemill.contracts.events import ignore
from tidemill.contracts.workers import Place
from tidemill.planning.budget import NO_LIMIT
from tidemill.residency.manager import LeaseManager
from tidemill.rollout.dump import read_dump
from tidemill.testing.tiny import Family, make_tiny_model

LIMIT = 180.0
MISMATCH = "mismatch/logprob_abs_max"
SPAWNED = "cluster.use=tidemill.testing.spawned_cluster:SpawnedClusterSettings"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("architectures")
    prepare(folder)
    return folder


def trainer_log_probs(settings: Path, words: list[str], run: Path, batch: Batch) -> np.ndarray[Any, Any]:
    """Of the newest checkpoint, by a trainer that loads it."""
    trainer = build_trainer(load([settings], words).config, Place(), ignore)
    residency = LeaseManager(budget=NO_LIMIT, emit=ignore, deadline=10.0)
    stored, _ = newest(run / "checkpoints")
    assert stored is not None
    with residency.awake(trainer):
        trainer.load(stored.parts["trainer"])
        return trainer.log_probs(batch)


def transformers_log_probs(folder: Path, batch: Batch) -> np.ndarray[Any, Any]:
    """One row at a time, without padding, by the library that a user loads the export with."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    assert not any(info[f"{kind}_keys"] for kind in ("missing", "unexpected", "mismatched"))
    result = np.zeros(batch.tokens, np.float32)
    for start, end in itertools.pairwise(batch.offsets):
        ids = torch.tensor(batch.token_ids[start:end])
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0, :-1].float().log_softmax(-1)
        result[start + 1 : end] = logprobs.gather(1, ids[1:, None])[:, 0].numpy()
    return result


@pytest.mark.parametrize("family", get_args(Family))
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_export_speaks_as_the_trainer_of_its_checkpoint(
    base: Path,
    family: Family,
    tied: bool,
    dtype: Literal["float32", "bfloat16"],
) -> None:
    name = f"{family} {'tied' if tied else 'untied'} {dtype}"
    make_tiny_model(
        base / name / "model", family=family, tied=tied, dtype=dtype, hidden=32, layers=2, heads=4, kv_heads=2
    )
    run = base / name / "run"
    settings = recipe(base, run)
    words = [f"model={base / name / 'model'}", "steps=6", "eval.every=0", "checkpoint.export_dtype=float32"]
    assert main(["run", str(settings), "--quiet", *words]) == 0
    groups = read_dump(run / "rollouts" / "step-00000005.jsonl").groups
    batch = build_algorithm(load([settings], words).config).batch(groups)
    wanted = trainer_log_probs(settings, words, run, batch)
    found = transformers_log_probs(run / "export" / "step-00000006", batch)
    assert len(batch.offsets) > STEPS // 2
    assert float(np.abs(found - wanted).max()) < 1e-5
    out = base / name / "from disk"
    assert main(["ckpt", "export", str(run), "--out", str(out)]) == 0
    assert main(["ckpt", "verify", str(run)]) == 0
    bare = AutoModelForCausalLM.from_pretrained(out)
    assert str(bare.dtype) == f"torch.{dtype}"  # the base's own, unless it is asked for another
    if dtype == "float32":
        assert np.array_equal(transformers_log_probs(out, batch), found)


def test_two_ranks_that_share_experts_export_them_as_transformers_reads_them(base: Path) -> None:
    """Handed to an engine in a process of its own before each step, saved and exported by each rank for itself."""
    folder, run = base / "two ranks", base / "two ranks" / "run"
    make_tiny_model(folder / "model", family="qwen3_moe", tied=False, hidden=32, layers=2, heads=4, kv_heads=2)
    settings = recipe(base, run)
    words = [f"model={folder / 'model'}", "steps=6", "eval.every=0", "checkpoint.export_dtype=float32"]
    process = started(["run", str(settings), *words, SPAWNED, "trainer.ranks=2"], folder / "log")
    process.join(LIMIT)
    assert process.exitcode == 0, (folder / "log").read_text()[-3000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    apart = [row[MISMATCH] for row in rows if MISMATCH in row]
    assert len(apart) > 1 and max(apart) < 1e-4
    groups = read_dump(run / "rollouts" / "step-00000005.jsonl").groups
    batch = build_algorithm(load([settings], words).config).batch(groups)
    export = run / "export" / "step-00000006"
    wanted = trainer_log_probs(settings, words, run, batch)
    assert float(np.abs(transformers_log_probs(export, batch) - wanted).max()) < 1e-5
    stored, held = load_file(folder / "model" / "model.safetensors"), load_file(export / "model.safetensors")
    assert {name: tensor.shape for name, tensor in held.items()} == {name: t.shape for name, t in stored.items()}
    experts = [name for name in held if ".experts." in name]
    assert len(experts) == 12 and not any(torch.equal(held[name], stored[name]) for name in experts)
    out = folder / "from disk"
    assert main(["ckpt", "export", str(run), "--out", str(out)]) == 0
    again = load_file(out / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in held.items())
