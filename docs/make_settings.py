"""Makes docs/settings.md from the settings in the code: python docs/make_settings.py."""

import ast
import dataclasses
import inspect
import itertools
import re
import sys
import types
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

TEMPLATE = Path(__file__).parents[1]
sys.path.insert(0, str(TEMPLATE / "{{cookiecutter.project_slug}}"))

from config import Config  # noqa: E402
from engine.settings import ON_EVALUATION, ON_RESUME, SECTIONS, Settings  # noqa: E402

INTRODUCTION = """# Settings

Every flag of `train.py`, made from `engine/settings.py` and `config.py` by `python docs/make_settings.py`: the same as
`python train.py --help`, and what may change later. A value that breaks its rule is refused in one line, with exit code
2, before TensorFlow is imported.

- **Resumed**: whether the same run goes on with another value. Otherwise it is refused, with both values.
- **Evaluated**: whether `--evaluate-only` and `--evaluate-continuously` may have another value than the run. Otherwise
  they take the run's, and refuse one that contradicts it.

Another default for any of them goes into `config.py`. A setting of your own is a line there too; it may change at a
resume if it is declared as `MayChange[float]`, with `MayChange` of `engine.settings`.
"""


def page() -> str:
    """Returns the page. The user's settings come first, as in --help."""
    engine = [each.name for each in dataclasses.fields(Settings)]
    sections = {
        "Yours, in the first starter": [each.name for each in dataclasses.fields(Config) if each.name not in engine]
    }
    starts = [*map(engine.index, SECTIONS), None]
    for title, start, end in zip(SECTIONS.values(), starts, starts[1:], strict=False):
        sections[title] = engine[start:end]
    hints = get_type_hints(Config, include_extras=True) | get_type_hints(Settings, include_extras=True)
    texts, defaults = (
        texts_of(Settings) | texts_of(Config),
        {each.name: each.default for each in dataclasses.fields(Config)},
    )
    parts = [INTRODUCTION]
    for title, names in sections.items():
        parts.append(f"## {title}\n\n| Flag | Default | Resumed | Evaluated | What it does |\n|---|---|---|---|---|")
        for name in names:
            marks = getattr(hints[name], "__metadata__", ())
            free = ["yes" if mark in marks else "no" for mark in (ON_RESUME, ON_EVALUATION)]
            cells = [f"`--{name.replace('_', '-')}`{values(hints[name])}", default(defaults[name]), *free, texts[name]]
            parts.append(f"| {' | '.join(cells)} |")
        parts[-1] += "\n"
    return "\n".join(parts)


def texts_of(kind: type) -> dict[str, str]:
    """Returns the text below each setting of a dataclass, with its flags as code."""
    (body,) = (each.body for each in ast.parse(inspect.getsource(kind)).body)
    found = {}
    for setting, text in itertools.pairwise(body):
        if isinstance(setting, ast.AnnAssign) and isinstance(text, ast.Expr):
            words = " ".join(text.value.value.split())
            found[setting.target.id] = re.sub(r"--[a-z-]*[a-z]", r"`\g<0>`", words)
    return found


def values(hint: Any) -> str:
    """Returns what stands after a flag; nothing after a switch."""
    if get_origin(hint) is Annotated:
        return values(get_args(hint)[0])
    if get_origin(hint) is Literal:
        return " " + ", ".join(f"`{each}`" for each in get_args(hint))
    if isinstance(hint, types.UnionType) or get_origin(hint) not in (None, tuple):
        return " or".join(values(each) for each in get_args(hint) if each is not types.NoneType)
    if get_origin(hint) is tuple:
        return f"{values(get_args(hint)[0])} ..."
    return {bool: "", int: " N", float: " X", str: " TEXT", Path: " PATH"}[hint]


def default(value: Any) -> str:
    """Returns a default as it would be typed; nothing for what is left out."""
    if value is None or value is False or value == ():
        return ""
    return f"`{value}`"


if __name__ == "__main__":
    Path(*sys.argv[1:] or [TEMPLATE / "docs" / "settings.md"]).write_text(page(), encoding="utf-8")
