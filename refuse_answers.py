"""Refuses bad answers a moment before the pre_gen hook could.

cookiecutter makes the project's folder before it runs the hook. For a slug that is no folder's name this is too late:
"a/b" leaves `a` behind, and "" ends with "directory already exists". So the last entry of cookiecutter.json, which is
rendered when all answers are known and no folder is made, runs the hook's own rules through this extension.
"""

import runpy
from pathlib import Path

from cookiecutter.exceptions import FailedHookException
from jinja2 import Environment
from jinja2.ext import Extension

HOOK = Path(__file__).parent / "hooks" / "pre_gen_project.py"


class RefuseAnswers(Extension):
    """Adds the filter `refuse_bad_answers` to the template's environment."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        environment.filters["refuse_bad_answers"] = refuse_bad_answers


def refuse_bad_answers(answers: dict[str, str]) -> str:
    """Returns "". Raises FailedHookException, which cookiecutter prints before it exits 1, if the hook would refuse."""
    found = runpy.run_path(str(HOOK))["problems"](answers)
    if found:
        raise FailedHookException("\n".join(f"ERROR: {problem}" for problem in found))
    return ""
