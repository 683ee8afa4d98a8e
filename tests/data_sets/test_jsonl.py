import json
from pathlib import Path

import pytest

from tidemill.contracts.events import Notice
from tidemill.contracts.state import Cursor
from tidemill.data.jsonl import JsonlData
from tidemill.errors import DataError
from tidemill.testing.suites.data import DataSuite

CASES = Path(__file__).parents[1] / "data"
TEMPLATES = sorted((CASES / "chat_templates").glob("*.jinja"))


def write_rows(path: Path, count: int) -> Path:
    path.write_text(
        "".join(json.dumps({"id": f"r{n}", "prompt": f"hello {n}", "label": n}) + "\n" for n in range(count))
    )
    return path


class TestShuffledData(DataSuite):
    @pytest.fixture
    def data(self, load, tmp_path) -> JsonlData:
        return load(write_rows(tmp_path / "rows.jsonl", 10), shuffle=True)


class TestDataInOrder(DataSuite):
    @pytest.fixture
    def data(self, load, tmp_path) -> JsonlData:
        return load(write_rows(tmp_path / "rows.jsonl", 3))


def ids(prompts):
    return [prompt.id for prompt in prompts]


@pytest.mark.parametrize(("rows", "count"), [(8, 4), (10, 4), (3, 7)])
def test_a_resume_at_any_step_goes_on_as_if_never_stopped(rows, count, load, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", rows)
    data = load(path, shuffle=True, seed=5)
    cursor, saved, steps = Cursor(), [], []
    for _ in range(6):
        saved.append(cursor)
        prompts, cursor = data.take(cursor, count)
        steps.append([prompt.key for prompt in prompts])
    for step, begin in enumerate(saved):
        fresh, position, resumed = load(path, shuffle=True, seed=5), begin, []
        for _ in range(step, 6):
            prompts, position = fresh.take(position, count)
            resumed.append([prompt.key for prompt in prompts])
        assert resumed == steps[step:]
        assert position == cursor


def test_a_batch_crosses_the_end_of_an_epoch_without_a_gap(load, tmp_path):
    data = load(write_rows(tmp_path / "rows.jsonl", 10))
    first, cursor = data.take(Cursor(), 8)
    second, cursor = data.take(cursor, 4)
    assert ids(first + second) == [f"r{n}" for n in (*range(10), 0, 1)]
    assert [prompt.key for prompt in second] == ["0:r8", "0:r9", "1:r0", "1:r1"]
    assert (cursor.epoch, cursor.position) == (1, 2)


def test_the_epoch_after_a_resume_is_shuffled_as_that_epoch(load, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 8)
    data = load(path, shuffle=True)
    _, cursor = data.take(Cursor(), 12)
    rest, _ = load(path, shuffle=True).take(cursor, 4)
    first, _ = data.take(Cursor(), 8)
    whole, _ = data.take(Cursor(), 16)
    assert ids(rest) == ids(whole[12:])
    assert ids(whole[8:]) != ids(first)


def test_data_that_changed_behind_a_cursor_is_refused_with_the_position(load, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 10)
    _, cursor = load(path).take(Cursor(), 6)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(DataError, match=r"epoch 0, row 6 .* not those that were consumed"):
        load(path).take(cursor, 1)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    with pytest.raises(DataError, match=r"epoch 0, row 6 .* has 3 usable rows"):
        load(path).take(cursor, 1)


def test_rows_added_behind_the_cursor_are_accepted_where_the_order_is_the_files(load, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 4)
    _, cursor = load(path).take(Cursor(), 3)
    write_rows(path, 6)
    assert ids(load(path).take(cursor, 3)[0]) == ["r3", "r4", "r5"]


def test_all_bad_lines_are_reported_at_once_with_file_and_number(load):
    path = CASES / "prompts_malformed.jsonl"
    with pytest.raises(DataError) as caught:
        load(path)
    message = str(caught.value)
    assert "17 bad line(s)" in message
    assert f"{path}:2: not JSON" in message
    assert "and 7 more" in message
    assert "data.skip_bad_lines = true" in message


def test_bad_lines_are_skipped_counted_and_announced_where_that_is_asked_for(load):
    events: list[Notice] = []
    data = load(CASES / "prompts_malformed.jsonl", skip_bad_lines=True, emit=events.append)
    prompts = data.all_prompts()
    assert len(prompts) == 7
    assert {prompt.id for prompt in prompts} >= {"ok-1", "crlf", "bom-inside", "ok-last-no-newline"}
    assert events[0].details["skipped"] == 17
    assert events[0].level == "warning"


def test_unusual_text_is_read_whole_and_repairs_are_announced(load):
    events: list[Notice] = []
    data = load(CASES / "prompts_odd_unicode.jsonl", emit=events.append)
    assert len(data) == 23
    assert "2 rows" in events[0].text
    for prompt in data.all_prompts():
        prompt.text.encode()


@pytest.mark.parametrize("limit", [1, 2, 15, 16, 17, 31, 32, 33])
def test_prompts_are_measured_as_sent_and_the_limit_itself_passes(limit, load):
    """One token a character, and the start token that is sent with them."""
    data = load(CASES / "prompts_lengths.jsonl", max_prompt_tokens=limit)
    sizes = [0, 1, 14, 15, 16, 17, 31, 32, 33, 63, 64, 65, 200]
    assert ids(data.all_prompts()) == [f"len-{size}" for size in sizes if size + 1 <= limit]


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_the_template_counts_towards_the_limit(template, load, tokenizer_with):
    tokenizer = tokenizer_with(template.read_text())
    overhead = len(tokenizer.read_chat([{"role": "user", "content": ""}])[1])
    events: list[Notice] = []
    data = load(
        CASES / "prompts_lengths.jsonl", max_prompt_tokens=32, tokenizer=tokenizer, chat="template", emit=events.append
    )
    sizes = [0, 1, 14, 15, 16, 17, 31, 32, 33, 63, 64, 65, 200]
    kept = [f"len-{size}" for size in sizes if size + overhead <= 32]
    assert ids(data.all_prompts()) == kept
    assert events[0].details == {"dropped": 13 - len(kept), "kept": len(kept), "limit": 32}


def test_a_file_of_too_long_prompts_is_refused_with_the_numbers(load, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 3)
    with pytest.raises(DataError, match=r"all 3 are longer than data.max_prompt_tokens = 2, the shortest has 4 tokens"):
        load(path, max_prompt_tokens=2)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_refused(content, load, tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match="no usable row"):
        load(path)


def test_a_prompt_of_no_token_is_a_bad_line(load, tmp_path, tokenizer_with):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": []}\n{"prompt": ""}\n')
    tokenizer = tokenizer_with("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(DataError, match=r"rows.jsonl:2: an empty prompt"):
        load(path, tokenizer=tokenizer, chat="template")


def test_chats_without_a_template_are_refused_once_with_what_to_do(load, tmp_path, tokenizer_with):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "plain"}\n{"prompt": [{"role": "user", "content": "hi"}]}\n')
    with pytest.raises(DataError, match=r"line 2: .* no chat template; add"):
        load(path, tokenizer=tokenizer_with(None))
    with pytest.raises(DataError, match=r"line 1: .* no chat template; add"):
        load(path, tokenizer=tokenizer_with(None), chat="template")


def test_how_text_is_sent_is_a_choice(load, tmp_path, tiny):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "hi"}\n{"prompt": [{"role": "user", "content": "hi"}]}\n')
    plain, chat = load(path).all_prompts()
    assert plain.token_ids == tiny.encode_plain("hi")
    assert chat.token_ids == tiny.read_chat([{"role": "user", "content": "hi"}])[1]
    assert chat.text == "<s><|user|>hi<|eot|><|assistant|>"
    assert [prompt.token_ids for prompt in load(path, chat="template").all_prompts()] == [chat.token_ids] * 2
    with pytest.raises(DataError, match=r'rows.jsonl:2: a list of messages, but data.chat = "plain"'):
        load(path, chat="plain")


def test_what_the_template_refuses_is_a_bad_line(load, tmp_path, tokenizer_with):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": [{"role": "system", "content": "only"}]}\n')
    tokenizer = tokenizer_with((CASES / "chat_templates/needs_user_and_system_first.jinja").read_text())
    with pytest.raises(DataError, match=r"rows.jsonl:1: the chat template refuses these messages: no user message"):
        load(path, tokenizer=tokenizer)


def test_every_row_with_control_tokens_in_its_text_is_read(load, tiny):
    data = load(CASES / "prompts_special_tokens.jsonl")
    assert len(data) == 13


def test_prompts_for_evaluation_come_in_the_files_order_up_to_a_limit(load, tmp_path):
    data = load(write_rows(tmp_path / "rows.jsonl", 5), shuffle=True)
    assert [prompt.key for prompt in data.all_prompts(2)] == ["eval:r0", "eval:r1"]
    assert len(data.all_prompts(0)) == 5
