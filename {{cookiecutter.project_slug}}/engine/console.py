"""Console output."""

import os
import sys
from typing import Any

import rich.console


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


# Lines are not wrapped, and "[32]" is text, not a style.
console = _Console(soft_wrap=True, highlight=False, markup=False)


def print_facts(title: str, facts: dict[str, Any]) -> None:
    """Prints a title, then a name and a value per line."""
    console.print(title, style="bold")
    width = max(map(len, facts))
    for name, value in facts.items():
        console.print(f"  {name:<{width}}  {value}")
