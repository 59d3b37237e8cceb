"""The console that everything is told on, and how facts are laid out there."""

from typing import Any

import rich.console

# Lines are as long as they are, and "[32]" is a text, not a style.
console = rich.console.Console(soft_wrap=True, highlight=False, markup=False)


def print_facts(title: str, facts: dict[str, Any]) -> None:
    """Prints what is about to happen, or what came out: a title, then a name and a value per line."""
    console.print(title, style="bold")
    width = max(map(len, facts))
    for name, value in facts.items():
        console.print(f"  {name:<{width}}  {value}")
