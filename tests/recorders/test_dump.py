import json
from pathlib import Path

import numpy as np

from tidemill.contracts.batch import Batch
from tidemill.contracts.engine import Sampling
from tidemill.contracts.events import Learned
from tidemill.recorders.dump import DumpSink
from tidemill.rollout.dump import dumped_steps, read_dump
from tidemill.testing.suites.recorder import HOSTILE, SinkSuite, scored_group


def sink_into(folder: Path) -> DumpSink:
    return DumpSink(folder=folder, sampling=Sampling(max_new_tokens=2, temperature=0.6))


class TestDumpSink(SinkSuite):
    def make(self, run: Path) -> DumpSink:
        return sink_into(run / "rollouts")


def learned(text: str) -> Learned:
    """One prompt with two answers of two tokens, worth +1 and -1."""
    batch = Batch(
        token_ids=np.array([1, 2, 3, 1, 2, 3]),
        offsets=np.array([0, 3, 6]),
        loss_mask=np.array([False, True, True] * 2),
        logprobs=np.zeros(6, dtype=np.float32),
        advantages=np.array([0, 1, 1, 0, -1, -1], dtype=np.float32),
        metrics={},
    )
    return Learned(groups=[scored_group(text, (1.0, 0.0))], batch=batch, logprobs=batch.logprobs - 1)


def test_what_was_learned_from_comes_back_whole_with_its_advantages(tmp_path: Path) -> None:
    sink = sink_into(tmp_path)
    sink.resume(0, {})
    event = learned(HOSTILE)
    sink.write(12, event)
    (path,) = dumped_steps(tmp_path)
    assert path.name == "step-00000012.jsonl"
    found = read_dump(path)
    assert found.groups == tuple(event.groups)
    assert found.sampling == {"temperature": 0.6, "top_p": 1.0, "top_k": 0.0}
    first, second = event.groups[0].trajectories
    assert found.advantages == {first.id: 1.0, second.id: -1.0}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["trainer_logprobs"] for line in lines] == [[-1.0, -1.0]] * 2


def test_a_step_done_again_after_a_resume_replaces_its_file(tmp_path: Path) -> None:
    sink = sink_into(tmp_path)
    for text in ("first", "again"):
        sink.resume(12, {})
        sink.write(12, learned(text))
    (path,) = dumped_steps(tmp_path)
    assert read_dump(path).groups[0].prompt.text == "again"


def test_a_supervised_step_leaves_no_file(tmp_path: Path) -> None:
    sink = sink_into(tmp_path)
    sink.write(0, Learned(groups=[], batch=learned("x").batch, logprobs=learned("x").logprobs))
    assert not list(tmp_path.iterdir())


def test_what_a_checkpoint_counts_on_survives_a_power_cut(tmp_path: Path, synced: list[Path]) -> None:
    folder = tmp_path / "rollouts"
    sink = sink_into(folder)
    for step in (3, 4):
        sink.write(step, learned("a"))
    assert synced == []
    sink.state()
    assert synced == [*dumped_steps(folder), folder, tmp_path]
    sink.state()
    assert len(synced) == 4
