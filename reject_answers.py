"""Rejects answers that would make a broken project: one ERROR line per problem, all problems at once.

cookiecutter makes the project's folder before it runs a pre_gen hook, which is too late for some slugs: "a/b" leaves
`a` behind, "" ends with "directory already exists", and `--accept-hooks no` runs no hook. So the last entry of
cookiecutter.json, which cookiecutter renders once it knows all answers, calls this extension.
"""

import re
import unicodedata
from collections.abc import Iterator

from cookiecutter.exceptions import FailedHookException
from jinja2 import Environment
from jinja2.ext import Extension

LONGEST_SLUG = 40
WINDOWS_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10))}


class RejectAnswers(Extension):
    """Adds the filter `reject_bad_answers` to the template's environment."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        environment.filters["reject_bad_answers"] = reject_bad_answers


def reject_bad_answers(answers: dict[str, str]) -> str:
    """Returns "". Raises FailedHookException, which cookiecutter prints before it exits 1, if an answer is bad."""
    rules = {"project_slug": _broken_slug_rules, "project_name": _broken_name_rules, "author_name": _broken_name_rules}
    lines = [
        f"ERROR: {field} {answers[field]!r} {rule}"
        for field, broken_rules in rules.items()
        if field in answers  # With --replay-file they are absent.
        for rule in broken_rules(answers[field])
    ]
    if lines:
        raise FailedHookException("\n".join(lines))
    return ""


def _broken_slug_rules(slug: str) -> Iterator[str]:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", slug):
        yield "must start with a lower-case letter and contain only lower-case letters, digits and underscores"
    elif slug.endswith("_"):
        yield "ends with an underscore (a package name must end with a letter or a digit): remove it"
    if len(slug) > LONGEST_SLUG:
        yield f"has {len(slug)} characters: use at most {LONGEST_SLUG}"
    if slug.lower() in WINDOWS_DEVICES:
        yield "is the name of a device on Windows: choose another name"


def _broken_name_rules(name: str) -> Iterator[str]:
    if not name.strip():
        yield "is empty: enter a name"
    elif name != name.strip():
        yield "starts or ends with white space: remove it"
    if '"' in name or "\\" in name:
        yield 'contains " or a backslash (pyproject.toml would not be valid): remove it'
    if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in name):
        yield "contains a line break or another control character: remove it"
