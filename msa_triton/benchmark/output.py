"""Results as text and JSON, and progress."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from msa_triton import versions

GB = 1e9  # bytes


def text_table(columns: dict, rows: list) -> str:
    """Rows as text, right-aligned.

    Args:
        columns: {heading: function of a row, that returns text, or None for "-"}.
    """
    cells = [list(columns)]
    for row in rows:
        cells.append(["-" if (text := cell(row)) is None else str(text) for cell in columns.values()])
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def digits(value: float | None, form: str = ".3g") -> str | None:
    """A number as text; without an exponent where four digits are enough. None stays None."""
    if value is None:
        return None
    return f"{value:.0f}" if form == ".3g" and 1000 <= abs(value) < 1e7 else format(value, form)


def write_json(path: Path | None, command: str, **results) -> None:
    """Writes the results with the versions that gave them; nothing without a path."""
    if path is not None:
        path.write_text(json.dumps({"command": command, "versions": versions(), **results}, indent=1) + "\n")


class Progress:
    """A bar on the standard error stream by tqdm, or a line for each step where tqdm is not installed."""

    def __init__(self, total: int):
        try:
            from tqdm import tqdm
        except ImportError:
            self._bar = None
        else:
            self._bar = tqdm(total=total, unit="step", leave=False)
        self._total, self._begun = total, 0

    def begin(self, text: str) -> None:
        """Says what begins now; what began before is done."""
        self._begun += 1
        if self._bar is None:
            print(f"{self._begun}/{self._total} {text}", file=sys.stderr, flush=True)
            return
        self._bar.update(self._begun - 1 - self._bar.n)
        self._bar.set_description(text)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error) -> None:
        if self._bar is not None:
            self._bar.close()
