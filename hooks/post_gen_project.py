"""Puts the files of the chosen starter into the project, removes the others, and says what to do next."""

import shutil
from pathlib import Path

chosen = Path("starters", "{{ cookiecutter.starter }}")
if chosen.is_dir():
    # about.md is a part of the README already.
    shutil.copytree(chosen, ".", dirs_exist_ok=True, ignore=shutil.ignore_patterns("about.md"))
shutil.rmtree("starters", ignore_errors=True)
print('Next, in an environment for it: cd {{ cookiecutter.project_slug }} && pip install -e ".[dev]"')
print("Then: python train.py")
