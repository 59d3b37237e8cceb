"""Puts the files of the chosen starter into the project, removes the others, and says what to do next."""

import shutil
from pathlib import Path

chosen = Path("starters", "{{ cookiecutter.starter }}")
if chosen.is_dir():
    shutil.copytree(chosen, ".", dirs_exist_ok=True)
shutil.rmtree("starters", ignore_errors=True)
print('Next, in an environment for it: cd {{ cookiecutter.project_slug }} && pip install -e ".[dev]"')
print("Then: python train.py")
