from tidemill.recorders.page.tables import checkpoint_rows, fact, moment, notice_items, setting_rows, text


def test_all_text_is_escaped_and_visible() -> None:
    assert text("<b>&\"'\x1b") == "&lt;b&gt;&amp;&quot;&#x27;\\x1b"
    assert "<i>" not in fact("<i>", "<i>", "<i>")


def test_a_checkpoint_is_one_row_with_its_last_status() -> None:
    events = [
        {"checkpoint_step": 50, "status": "staged", "time": 1e9, "seconds": 0.006, "bytes": 1024},
        {"checkpoint_step": 50, "status": "durable", "time": 1e9 + 2, "seconds": 2.0, "bytes": 2048},
        {"checkpoint_step": 100, "status": "failed", "time": 1e9 + 9, "reason": "no space left"},
        {"checkpoint_step": 50, "status": "pruned", "time": 1e9 + 9},
    ]
    first, second = checkpoint_rows(events).split("</tr>")[:2]
    assert "<td>100</td>" in first and "no space left" in first and "failed" in first
    assert "pruned" in second and "2.0 KiB" in second and "6 ms" in second and "2.0 s" in second


def test_very_many_rows_are_counted_instead_of_shown() -> None:
    rows = checkpoint_rows([{"checkpoint_step": i, "status": "pruned"} for i in range(1000)])
    assert "and 800 older ones" in rows and rows.count("<tr>") == 201
    items = notice_items([{"step": i, "text": "x", "level": "info"} for i in range(1000)])
    assert "800 more in events.jsonl" in items and items.count("<li") == 201


def test_settings_show_where_each_value_is_from() -> None:
    rows = setting_rows({"a.b": {"value": [1, "x"], "origin": "run.toml"}, "c": {"value": None, "origin": "default"}})
    assert '<tr class="set"><td>a.b</td><td><code>[1, &quot;x&quot;]</code></td><td>run.toml</td></tr>' in rows
    assert "<tr><td>c</td><td><code>null</code></td><td>default</td></tr>" in rows
    assert setting_rows(["not", "a", "table"]) == ""
    assert "<code>3</code>" in setting_rows({"plain": 3})


def test_a_moment_is_utc_and_nonsense_is_empty() -> None:
    assert moment(1_796_000_000) == "2026-11-30 00:53:20 UTC"
    assert moment("now") == moment(None) == moment(-1) == moment(1e300) == ""
