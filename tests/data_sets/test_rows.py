import json
from pathlib import Path

import pytest

from tidemill.data.rows import read_rows
from tidemill.errors import DataError

CASES = Path(__file__).parents[1] / "data"
LINES = (CASES / "prompts_malformed.jsonl").read_bytes().split(b"\n")
EXPECTED = json.loads((CASES / "prompts_malformed.expected.json").read_text())["lines"]
# Where the cases leave the rule to us: a key given twice and NaN are refused; an empty prompt is a row (whether it can
# be sent is for the tokenizer to say), a mark is dropped, extra columns are kept apart, a label may be any value.
BAD = {2, 3, 4, 7, 8, 9, 10, 11, 12, 13, 14, 16, 17, 18, 19, 22, 25}
BLANK = {5, 6}
GOOD = set(range(1, 27)) - BAD - BLANK


def test_every_bad_line_of_the_cases_is_found_under_its_number():
    file = read_rows(CASES / "prompts_malformed.jsonl")
    assert {line.line for line in file.bad} == BAD
    assert {row.line for row in file.rows} == GOOD
    assert {int(number) for number, words in EXPECTED.items() if words.startswith("bad")} <= BAD


@pytest.mark.parametrize("number", range(1, 27))
def test_each_line_alone_is_judged_alike(number, tmp_path):
    path = tmp_path / "one.jsonl"
    path.write_bytes(b"\n" * 2 + LINES[number - 1] + b"\n")
    file = read_rows(path)
    assert [line.line for line in file.bad] == ([3] if number in BAD else [])
    assert [row.line for row in file.rows] == ([3] if number in GOOD else [])


def test_reasons_name_what_is_wrong():
    reasons = {line.line: line.reason for line in read_rows(CASES / "prompts_malformed.jsonl").bad}
    assert reasons[7] == "a line must be an object, not an array"
    assert reasons[11] == "key 'prompt' is given twice"
    assert reasons[12] == "NaN is not JSON; write null or a number"
    assert reasons[14] == "prompt must be text or a list of messages, not null"
    assert reasons[18] == "message 1 needs a role such as 'user'"
    assert reasons[19].startswith("not UTF-8")
    assert reasons[22].startswith("not JSON: Invalid control character")


def test_all_rows_of_unusual_text_are_read_and_halves_of_pairs_replaced():
    file = read_rows(CASES / "prompts_odd_unicode.jsonl")
    rows = {row.id: row.prompt for row in file.rows}
    assert len(rows) == 23
    assert not file.bad
    assert file.repaired == 2
    assert rows["lone-high-surrogate"] == "broken \ufffd here"
    assert rows["pair-escaped"] == "fine \U0001f600 here"
    assert rows["leading-trailing-space"] == "  keep both ends  "
    assert rows["crlf-inside"] == "first\r\nsecond\rthird"


def test_line_separators_inside_strings_do_not_end_a_line(tmp_path):
    path = tmp_path / "separators.jsonl"
    text = "a\u2028b\u2029c\x85d"
    path.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\r\n", encoding="utf-8", newline="")
    assert [row.prompt for row in read_rows(path).rows] == [text]


def test_columns_without_a_meaning_are_kept_apart():
    rows = {row.id: row for row in read_rows(CASES / "prompts_malformed.jsonl").rows}
    assert rows["extra-columns"].extra == {"reward": 1.0, "tokens": [1, 2]}
    assert rows["label-list"].label == ["4", "four"]


def test_ids_are_unique_and_made_from_line_numbers_where_missing(tmp_path):
    path = tmp_path / "ids.jsonl"
    path.write_text('{"prompt":"a"}\n{"id":7,"prompt":"b"}\n{"id":"7","prompt":"c"}\n{"id":true,"prompt":"d"}\n')
    file = read_rows(path)
    assert [row.id for row in file.rows] == ["line-1", "7"]
    assert [(line.line, line.reason) for line in file.bad] == [
        (3, "id '7' was given on line 2 already"),
        (4, "id must be text or a whole number, not true or false"),
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt":"a","label":1e999}', "too large"),
        ('{"prompt":"a","label":-Infinity}', "is not JSON"),
        ('{"prompt":"a","label":' + "[" * 100_000, "nested too deeply"),
        ('{"prompt":"a","label":' + "9" * 5000 + "}", "digits"),
    ],
)
def test_values_that_break_readers_are_bad_lines(line, words, tmp_path):
    path = tmp_path / "values.jsonl"
    path.write_text(line)
    (bad,) = read_rows(path).bad
    assert words in bad.reason


def test_a_missing_file_and_a_folder_are_errors_of_the_data(tmp_path):
    with pytest.raises(DataError, match="No such file"):
        read_rows(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match="directory"):
        read_rows(tmp_path)
