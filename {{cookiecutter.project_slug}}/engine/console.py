"""The console that everything is told on, and how facts are laid out there."""

import os
import sys
from typing import Any

import rich.console


class _Console(rich.console.Console):
    """A console that training does not depend on."""

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError:  # The disk that the output goes to is full, or whoever read it has ended.
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Goes on without a console; rich would end the program."""
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


# Lines are as long as they are, and "[32]" is a text, not a style.
console = _Console(soft_wrap=True, highlight=False, markup=False)


def print_facts(title: str, facts: dict[str, Any]) -> None:
    """Prints what is about to happen, or what came out: a title, then a name and a value per line."""
    console.print(title, style="bold")
    width = max(map(len, facts))
    for name, value in facts.items():
        console.print(f"  {name:<{width}}  {value}")
