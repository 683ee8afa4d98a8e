"""Rows of cells as lines of text, each column as wide as its widest cell."""

from collections.abc import Sequence

__all__ = ["lines_of"]


def lines_of(rows: Sequence[Sequence[str]], *, indent: int = 0) -> list[str]:
    """One line a row, columns two spaces apart. Every row has as many cells as the first."""
    if not rows:
        return []
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    space = " " * indent
    return [
        (space + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip() for row in rows
    ]
