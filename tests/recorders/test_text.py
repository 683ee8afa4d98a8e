from tidemill.recorders.text import cut, one_line, visible


def test_what_could_move_a_cursor_or_turn_a_line_becomes_visible() -> None:
    text = "bell\x07 esc\x1b[31m nul\x00 csi\x9b cr\r rtl\u202e half\ud83d sep\u2028 bom\ufeff non\uffff"
    shown = visible(text)
    assert shown == (
        "bell\\x07 esc\\x1b[31m nul\\x00 csi\\x9b cr\\r rtl\\u202e half\\ud83d sep\\u2028 bom\\ufeff non\\uffff"
    )
    shown.encode("utf-8")


def test_ordinary_text_of_any_script_stays() -> None:
    for text in ("naïve café", "日本語 𠀀", "אבג", "👨‍👩‍👧‍👦", "a\tb\nc", "1 000"):
        assert visible(text) == text
    assert visible("a\r\nb") == "a\nb"


def test_one_line_is_one_line() -> None:
    assert one_line("a\nb\tc") == "a\\nb\\tc"


def test_a_cut_text_keeps_its_beginning_and_its_end() -> None:
    text = "a" * 500 + "b" * 500
    short = cut(text, 100)
    assert short.startswith("a" * 75 + " [...") and short.endswith("...] " + "b" * 25)
    assert "900 characters" in short
    assert cut("short", 100) == "short"
