import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from tidemill.contracts.engine import Sampling
from tidemill.contracts.sample import Group, ScoreStatus, StopReason
from tidemill.errors import DataError, TidemillError
from tidemill.faults import armed
from tidemill.rollout.dump import RolloutDump, dumped_steps, read_dump

CASES = Path(__file__).parents[1] / "data"


def dump_into(folder, **sampling):
    return RolloutDump(folder, sampling=Sampling(max_new_tokens=4, **sampling), otherwise="set rollout.dump = false")


def group(*members):
    return Group(prompt=members[0].prompt, trajectories=members)


def test_what_is_written_is_read_back_equal(tmp_path, trajectory):
    groups = (
        group(trajectory(0.1, parts={"format": 0.3}), trajectory(None, sample=1), trajectory("failed", sample=2)),
        group(trajectory(1.0, row="other", stop_reason=StopReason.LENGTH)),
        group(trajectory(1.0, row="third", token_ids=(), logprobs=(), loss_mask=(), score=None)),
    )
    path = dump_into(tmp_path / "rollouts").write(12, groups, {"0:q#0": 0.1, "0:q#2": -1.5})
    assert path.name == "step-00000012.jsonl"
    step = read_dump(path)
    assert (step.step, step.groups) == (12, groups)
    assert step.advantages == {"0:q#0": 0.1, "0:q#2": -1.5}


def test_log_probs_keep_every_bit(tmp_path, trajectory):
    singles = [struct.unpack("f", struct.pack("f", value))[0] for value in (-0.1, -1e-30, -12.345678, -0.0, -1.4e-45)]
    member = trajectory(1.0, token_ids=(1,) * 5, logprobs=tuple(singles), loss_mask=(True,) * 5)
    (read,) = read_dump(dump_into(tmp_path).write(0, [group(member)])).groups[0].trajectories
    assert [struct.pack("d", value) for value in read.logprobs] == [struct.pack("d", value) for value in singles]


def test_log_probs_that_are_no_numbers_survive_in_valid_json(tmp_path, trajectory):
    member = trajectory(1.0, logprobs=(float("-inf"), float("nan")))
    path = dump_into(tmp_path).write(0, [group(member)])
    json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(word))
    (read,) = read_dump(path).groups[0].trajectories
    assert read.logprobs[0] == float("-inf")
    assert read.logprobs[1] != read.logprobs[1]


def test_every_odd_text_of_the_cases_survives_as_prompt_and_as_answer(tmp_path, trajectory):
    lines = (CASES / "prompts_odd_unicode.jsonl").read_bytes().split(b"\n")
    texts = [json.loads(line)["prompt"] for line in lines if line]
    assert len(texts) == 23
    made = []
    for number, text in enumerate(texts):
        member = trajectory(1.0, row=f"{number} {text}", text=text)
        made.append(replace(member, prompt=replace(member.prompt, text=text, label=text)))
    groups = tuple(map(group, made))
    path = dump_into(tmp_path).write(1, groups)
    assert read_dump(path).groups == groups
    assert len(path.read_bytes().split(b"\n")) == 24
    assert path.read_bytes().isascii()


def test_a_step_written_again_replaces_its_file_and_leaves_nothing_else(tmp_path, trajectory):
    dump = dump_into(tmp_path)
    dump.write(3, [group(trajectory(1.0), trajectory(0.0, sample=1))])
    dump.write(3, [group(trajectory(1.0))])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003.jsonl"]
    assert len(read_dump(tmp_path / "step-00000003.jsonl").groups[0].trajectories) == 1


def test_a_step_that_cannot_be_written_leaves_the_old_file_whole(tmp_path, trajectory):
    dump = dump_into(tmp_path)
    path = dump.write(3, [group(trajectory(1.0))])
    content = path.read_bytes()
    with pytest.raises(TypeError, match="JSON"):
        dump.write(3, [group(replace(trajectory(1.0), prompt=replace(trajectory(1.0).prompt, label={1, 2})))])
    with armed("rollout.dump.write=disk-full"), pytest.raises(TidemillError, match="No space left"):
        dump.write(3, [group(trajectory(0.0))])
    assert path.read_bytes() == content
    assert [left.name for left in tmp_path.iterdir()] == [path.name]
    blocked = dump_into(path / "folder")
    with pytest.raises(TidemillError, match="cannot write rollouts of step 4"):
        blocked.write(4, [group(trajectory(1.0))])


def test_what_a_dump_does_not_keep_is_refused(tmp_path, trajectory):
    with pytest.raises(TidemillError, match="routed experts or multimodal"):
        dump_into(tmp_path).write(0, [group(trajectory(1.0, routed_experts=[1]))])


def test_files_come_in_the_order_of_their_steps(tmp_path, trajectory):
    dump = dump_into(tmp_path)
    for step in (100_000_000, 2, 10):
        dump.write(step, [group(trajectory(1.0))])
    (tmp_path / "notes.jsonl").write_text("")
    assert [read_dump(path).step for path in dumped_steps(tmp_path)] == [2, 10, 100_000_000]


def test_a_folder_without_dumps_is_refused_with_what_to_do(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(DataError, match=r"rollout.dump = true"):
            dumped_steps(folder)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"format": 2', '"format": 1', "format 1 is not 2"),
        ('"top_p": 1.0, ', '"top_p": "most", ', "most"),
        ('"sampling"', '"sampler"', "'sampling'"),
        ('"sample": 0, ', "", "'sample'"),
        ("[-0.5, -0.25]", "[-0.5]", "differ in length"),
        ("[-0.5, -0.25]", '[-0.5, "x"]', "'x' is not a number"),
        ('"eos"', '"ended"', "StopReason"),
        ("}\n", "", "delimiter"),
    ],
)
def test_a_damaged_line_is_named(old, new, words, tmp_path, trajectory):
    path = dump_into(tmp_path).write(0, [group(trajectory(1.0, sample=1)), group(trajectory(1.0, row="other"))])
    first, second = path.read_text().splitlines(keepends=True)
    assert old in second
    path.write_text(first + second.replace(old, new))
    with pytest.raises(DataError) as caught:
        read_dump(path)
    assert f"{path}:2: " in str(caught.value)
    assert words in str(caught.value)


def test_scores_keep_their_status(tmp_path, trajectory):
    path = dump_into(tmp_path).write(0, [group(trajectory("failed"))])
    (read,) = read_dump(path).groups[0].trajectories
    assert (read.score.status, read.score.reason) == (ScoreStatus.FAILED, "why")


def test_a_dump_says_from_what_distribution_was_sampled(tmp_path, trajectory):
    path = dump_into(tmp_path, temperature=0.6, top_p=0.9, top_k=40).write(0, [group(trajectory(1.0))])
    assert read_dump(path).sampling == {"temperature": 0.6, "top_p": 0.9, "top_k": 40.0}
