"""Console output.

A terminal gets colours, tables, and a live line that vanishes. A pipe, a log file, a notebook or TERM=dumb gets plain
lines without control characters.
"""

import os
import sys
from typing import Any

import rich.console
import rich.table
import rich.text

# Of a line, where the output is no terminal and COLUMNS is not set.
PLAIN_WIDTH = 120
# Of the numbers that people read; files keep all.
DIGITS = 4


class _Console(rich.console.Console):
    """A console whose failure does not end the training."""

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError:  # The output's disk is full, or its reader has ended.
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Goes on without a console; rich would end the program."""
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    def show_cursor(self, show: bool = True) -> bool:
        """Leaves the cursor as it is: a process that is killed could not bring a hidden one back."""
        return False

    @property
    def is_live(self) -> bool:
        """Whether a line can be drawn again. FORCE_COLOR, as in CI, makes no terminal of a pipe."""
        return self.is_interactive and not self.quiet and bool(getattr(self.file, "isatty", bool)())

    @property
    def line_width(self) -> int:
        """How many characters a line should have at most."""
        return self.width if self.is_terminal or "COLUMNS" in os.environ else PLAIN_WIDTH


# Lines are not wrapped, and "[32]" is text, not a style. A notebook gets the same lines as a pipe.
console = _Console(soft_wrap=True, highlight=False, markup=False, force_jupyter=False)


def print_facts(title: str, facts: dict[str, Any]) -> None:
    """Prints a title, then a name and a value per line; in a terminal long values are wrapped."""
    console.print(title, style="bold")
    if console.is_terminal:
        rows = [(rich.text.Text(f"  {name}"), rich.text.Text(str(value))) for name, value in facts.items()]
        console.print(columns(rows), soft_wrap=False)
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        console.print(f"  {name:<{width}}  {value}")


def columns(rows: list[tuple[rich.text.Text, ...]]) -> rich.table.Table:
    """Returns rows as a table for a terminal, whose last column is wrapped."""
    table = rich.table.Table.grid(padding=(0, 2, 0, 0))
    *others, last = range(len(rows[0]))
    for _ in others:
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=1 if last else None)
    for row in rows:
        table.add_row(*row)
    return table


def digits(value: Any) -> str:
    """Returns a number with about four digits: "0.0941", "1.200", "1,258"; anything else as it is."""
    if not isinstance(value, float):
        return str(value)
    if abs(value) >= 10**DIGITS and abs(value) < 1e15:
        return f"{value:,.0f}"
    if 1e-3 <= abs(value) < 1:
        return f"{value:.{DIGITS}f}"
    return f"{value:#.{DIGITS}g}".rstrip(".")
