"""Puts the files of the chosen starter into the project, removes the others, and says what to do next."""

import contextlib
import shutil
from pathlib import Path

chosen = Path("starters", "{{ cookiecutter.starter }}")
if chosen.is_dir():
    shutil.copytree(chosen, ".", dirs_exist_ok=True)
# A project that is rendered again may have other folders there.
for page in list(Path("starters").glob("*/docs/starter.md")):
    shutil.rmtree(page.parents[1], ignore_errors=True)
with contextlib.suppress(OSError):
    Path("starters").rmdir()
print('Next, in an environment for it: cd {{ cookiecutter.project_slug }} && pip install -e ".[dev]"')
print("Then: python train.py")
