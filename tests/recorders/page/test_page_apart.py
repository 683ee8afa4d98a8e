"""tidemill.recorders.page.apart"""

import re
from dataclasses import replace
from pathlib import Path

from tests.recorders.written import WrittenAtOnce

from tidemill.contracts.events import TokenApart, TokensApart
from tidemill.recorders.page.apart import apart_rows

TOKEN = TokenApart(
    trajectory="0:7#1", version=3, position=2, token_id=9, text=" five", before="3 + 2 =", engine=-0.5, trainer=-0.75
)


def written(run: Path, steps: dict[int, list[TokenApart]]) -> Path:
    sink = WrittenAtOnce(run=run)
    sink.resume(0, {})
    for step, tokens in steps.items():
        sink.write(step, TokensApart(tokens=tokens))
    sink.close()
    return run


def test_the_worst_of_all_steps_come_first(tmp_path: Path) -> None:
    worse = replace(TOKEN, trainer=-2.5, trajectory="0:8#0")
    rows = apart_rows(written(tmp_path, {0: [TOKEN], 1: [worse], 2: [replace(TOKEN, trainer=-0.6)]}))
    assert re.findall(r"\d:\d#\d", rows) == ["0:8#0", "0:7#1", "0:7#1"]
    assert rows.startswith("<tr><td>2</td><td>0:8#0</td><td>3</td>")
    assert "<code>3 + 2 =<mark> five</mark></code>" in rows
    assert "<td>-0.5000</td><td>-2.5000</td><td>2</td>" in rows


def test_a_log_prob_that_is_no_number_is_the_worst_of_all(tmp_path: Path) -> None:
    rows = apart_rows(written(tmp_path, {0: [replace(TOKEN, trainer=-99.0), replace(TOKEN, engine=float("nan"))]}))
    assert rows.split("</tr>")[0].endswith("<td>none</td><td>-0.7500</td><td>inf</td>")


def test_text_of_tokens_is_escaped_and_visible(tmp_path: Path) -> None:
    evil = replace(TOKEN, text="</mark><script>\x1b\ud83d", before="<b>", trajectory="<i>")
    rows = apart_rows(written(tmp_path, {0: [evil]}))
    assert "<script>" not in rows and "<b>" not in rows and "<i>" not in rows


def test_a_long_run_shows_a_few_and_an_empty_folder_none(tmp_path: Path) -> None:
    assert apart_rows(tmp_path) == ""
    assert apart_rows(written(tmp_path, {step: [TOKEN] * 8 for step in range(100)})).count("<tr>") == 20
