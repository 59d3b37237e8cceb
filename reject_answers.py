"""Rejects bad answers just before the pre_gen hook would, and also with `cookiecutter --accept-hooks no`.

cookiecutter makes the project's folder before it runs the hook. For some slugs this is too late: "a/b" leaves `a`
behind, and "" ends with "directory already exists". cookiecutter renders the last entry of cookiecutter.json when it
knows all answers and has not made the folder yet, so that entry runs the hook's rules through this extension.
"""

import runpy
from pathlib import Path

from cookiecutter.exceptions import FailedHookException
from jinja2 import Environment
from jinja2.ext import Extension

HOOK = Path(__file__).parent / "hooks" / "pre_gen_project.py"


class RejectAnswers(Extension):
    """Adds the filter `reject_bad_answers` to the template's environment."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        environment.filters["reject_bad_answers"] = reject_bad_answers


def reject_bad_answers(answers: dict[str, str]) -> str:
    """Returns "". Raises FailedHookException, which cookiecutter prints before it exits 1, if the hook would reject."""
    found = runpy.run_path(str(HOOK))["problems"](answers)
    if found:
        raise FailedHookException("\n".join(f"ERROR: {problem}" for problem in found))
    return ""
