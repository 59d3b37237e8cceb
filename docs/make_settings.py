"""Makes the project's docs/settings.md from its settings, in the template's environment: make settings."""

import ast
import dataclasses
import inspect
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).parents[1]
PROJECT = TEMPLATE / "{{cookiecutter.project_slug}}"
PAGE = PROJECT / "docs" / "settings.md"
sys.path.insert(0, str(PROJECT))

from engine import settings  # noqa: E402 - It lies in the folder just named.

HEAD = """# Settings

Every setting of `engine/settings.py`, in the order of `python train.py --help`. `config.py` has those of your task, and
may give these other defaults.

*May differ* says when a setting need not have the value with which the run was started: at a **resume**, or in an
**evaluation** (`--evaluate-only`, `--evaluate-continuously`). Any other difference is rejected, with both values.
"""


def page() -> str:
    """Returns the whole page."""
    texts, hints = docstrings(), typing.get_type_hints(settings.Settings, include_extras=True)
    lines = [HEAD]
    for each in dataclasses.fields(settings.Settings):
        if title := settings.SECTIONS.get(each.name):
            lines += [
                f"\n## {title}\n",
                "| Flag | Values | Default | What it does | May differ |",
                "|---|---|---|---|---|",
            ]
        default = "none" if each.default is dataclasses.MISSING else as_value(each.default)
        cells = (f"`--{each.name.replace('_', '-')}`", values(hints[each.name]), default, texts[each.name])
        lines.append(f"| {' | '.join(cells)} | {may_differ(hints[each.name])} |")
    return "\n".join(lines) + "\n"


def docstrings() -> dict[str, str]:
    """Returns the text below each setting, with its flags as code."""
    (kind,) = ast.parse(inspect.getsource(settings.Settings)).body
    found = {}
    for field, text in zip(kind.body, kind.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            words = " ".join(re.split(r"\s*\n\s*", text.value.value)).replace("|", "\\|")
            found[field.target.id] = re.sub(r"--[a-z-]*[a-z]", r"`\g<0>`", words)
    return found


def values(hint: Any) -> str:
    """Returns what a setting may be, for people."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return values(typing.get_args(hint)[0])
    if origin in (typing.Union, types.UnionType):
        return ", ".join(values(each) for each in typing.get_args(hint) if each is not type(None))
    if origin is typing.Literal:
        return ", ".join(f"`{each}`" for each in typing.get_args(hint))
    if origin is tuple:
        return f"{values(typing.get_args(hint)[0])}, ..."
    return {int: "whole number", float: "number", bool: "switch", str: "text", Path: "path"}[hint]


def as_value(default: Any) -> str:
    if default is None or default == ():
        return ""
    if default is False:
        return "off"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def may_differ(hint: Any) -> str:
    marks = getattr(hint, "__metadata__", ())
    names = {settings.ON_RESUME: "resume", settings.PER_LAUNCH: "resume, evaluation"}
    names |= dict.fromkeys((settings.INIT_ONLY, settings.IN_EVALUATION), "evaluation")
    return ", ".join(text for mark, text in names.items() if mark in marks)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
