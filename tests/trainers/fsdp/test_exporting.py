"""What a trainer exports is what it computes with, however many ranks hold it (`export_pieces` of its snapshots)."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.trainers.fsdp.conftest import MakeFsdpTrainer
from tests.trainers.fsdp.rank_service import Groups

from tidemill.algorithms.losses.clip import ClipLoss
from tidemill.checkpoint.base_model import read_base_model
from tidemill.checkpoint.export import export_model, export_pieces
from tidemill.checkpoint.safetensors_file import TensorFile
from tidemill.checkpoint.shard import LocalShard
from tidemill.contracts.checkpoint import Placer, TensorBytes
from tidemill.contracts.events import ignore
from tidemill.testing.suites.trainer_case import awake, ragged_batch
from tidemill.testing.tiny import Family, make_tiny_model
from tidemill.trainers.fsdp.trainer import FsdpTrainer

CLIP = ClipLoss(low=0.2, high=0.2)


def export(pieces: list[Placer], base: Path, target: Path, dtype: str = "auto") -> Path:
    return export_pieces(pieces=pieces, model=read_base_model(base), target=target, dtype=dtype, emit=ignore)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def trained(trainer: FsdpTrainer, steps: int = 2) -> FsdpTrainer:
    with awake(trainer):
        trainer.begin("rl")
        for seed in range(steps):
            trainer.step(ragged_batch(seed=seed), CLIP)
    return trainer


@pytest.mark.parametrize("base_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "tied"), [*((family, True) for family in get_args(Family)), ("llama", False), ("qwen3_moe", False)]
)
def test_log_probs_of_an_export_are_those_of_the_trainer_bit_by_bit(
    make_fsdp_trainer: MakeFsdpTrainer, tmp_path: Path, family: Any, tied: bool, base_dtype: Any
) -> None:
    base = make_tiny_model(
        tmp_path / "base", family=family, tied=tied, hidden=32, heads=4, kv_heads=2, dtype=base_dtype
    )
    trainer = trained(make_fsdp_trainer(model=base))
    with awake(trainer):
        snapshot = trainer.snapshot()
    target = export([LocalShard(snapshot.tensors)], base, tmp_path / "export", "float32")
    rounded = export([LocalShard(snapshot.tensors)], base, tmp_path / "auto")
    snapshot.release()
    again, batch = make_fsdp_trainer(model=target), ragged_batch(seed=9)
    with awake(trainer), awake(again):
        assert np.array_equal(trainer.log_probs(batch), again.log_probs(batch))
    held, exact = load_file(rounded / "model.safetensors"), load_file(target / "model.safetensors")
    assert {tensor.dtype for tensor in held.values()} == {getattr(torch, base_dtype)}
    assert all(torch.equal(held[name], tensor.to(held[name].dtype)) for name, tensor in exact.items())
    assert ("lm_head.weight" in held) == (not tied)
    assert not any("experts.gate_up_proj" in name for name in held)


@pytest.mark.parametrize("base_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_an_export_of_what_was_never_trained_is_the_base_tensor_by_tensor(
    make_fsdp_trainer: MakeFsdpTrainer, tmp_path: Path, family: Any, tied: bool, base_dtype: Any
) -> None:
    base = make_tiny_model(
        tmp_path / "base", family=family, tied=tied, hidden=32, heads=4, kv_heads=2, dtype=base_dtype
    )
    trainer = make_fsdp_trainer(model=base)
    with awake(trainer):
        snapshot = trainer.snapshot()
    target = export([LocalShard(snapshot.tensors)], base, tmp_path / "export")
    snapshot.release()
    ours, theirs = (TensorFile(folder / "model.safetensors").tensors() for folder in (target, base))
    assert {name: (held.dtype, held.shape, bytes(held.data)) for name, held in ours.items()} == {
        name: (held.dtype, held.shape, bytes(held.data)) for name, held in theirs.items()
    }
    others = {path.name for path in base.iterdir()} - {"model.safetensors"}
    assert others == {path.name for path in target.iterdir()} - {"model.safetensors"}
    assert all((target / name).read_bytes() == (base / name).read_bytes() for name in others)


Written = list[tuple[str, int, int]]


@contextmanager
def watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[Written]:
    """Every range of a safetensors file that is written behind its header: file, first byte, one past the last."""
    found: Written = []
    real = os.pwrite

    def pwrite(descriptor: int, data: Any, at: int) -> int:
        count = real(descriptor, data, at)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        found.append((path.name, at, at + count))
        return count

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        yield found


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("ranks", "replicas"), [(2, 1), (4, 2), (4, 1)])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_several_ranks_write_what_one_does_and_each_byte_once(
    groups: Groups,
    uneven_models: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    replicas: int,
    tied: bool,
    family: str,
) -> None:
    base = uneven_models(tied, family)
    group = groups.start(base, ranks, replicas=replicas)
    for seed in range(2):
        group.step(ragged_batch(seed=seed, rows=6, longest=20), CLIP)
    held: list[dict[str, TensorBytes]] = [pieces for pieces, _ in group.call("pieces")]
    saved = group.saved()
    weights = {
        name.removeprefix("model/"): tensor for name, tensor in saved.tensors.items() if name.startswith("model/")
    }
    with watching(monkeypatch) as written:
        target = export([LocalShard(pieces) for pieces in held if pieces], base, tmp_path / "ranks", "bfloat16")
    whole = export_model(weights=weights, base=base, target=tmp_path / "one", dtype="bfloat16", emit=ignore)
    assert contents(target) == contents(whole)
    begin = TensorFile(target / "model.safetensors").header.data_start
    assert [name for name, _, _ in written] == ["model.safetensors"] * len(written)
    for _, start, end in sorted(written, key=lambda range_: range_[1]):
        assert start == begin
        begin = end
    assert begin == (target / "model.safetensors").stat().st_size
    assert sum(1 for pieces in held if pieces) == ranks // replicas
