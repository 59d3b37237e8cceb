"""Renders the template as a user would, and runs what came out."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from programs import run_program

TEMPLATE = Path(__file__).parents[2]
PROJECT = TEMPLATE / "{{cookiecutter.project_slug}}"
TASKS = TEMPLATE / "tests/tasks"
STARTERS = json.loads((TEMPLATE / "cookiecutter.json").read_text(encoding="utf-8"))["starter"]

# Bytecode or caches inside the template's folder would be rendered into every project that a developer renders.
sys.dont_write_bytecode = True
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
os.environ["RUFF_NO_CACHE"] = "true"
os.environ["MYPY_CACHE_DIR"] = os.devnull


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command in a folder; `python` and the tools beside it are those that run the tests.

    `python FILE` and `python -m pytest` find TensorFlow imported already, see programs.py.
    """
    tools = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": os.pathsep.join([tools, os.environ["PATH"]])}
    if command[0] == "python" and (str(command[1]).endswith(".py") or command[1:3] == ("-m", "pytest")):
        return run_program(command[1:], folder, environment)
    return subprocess.run(
        [*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@dataclasses.dataclass(frozen=True)
class Bake:
    """A rendered project."""

    folder: Path

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs a command in the project; fails the test if it fails, or TensorFlow warns of something."""
        done = run(*command, folder=self.folder)
        assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        assert "WARNING:tensorflow" not in done.stderr, f"{command} made TensorFlow warn:\n{done.stderr}"
        return done

    def files(self) -> set[str]:
        return {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()}

    def result(self, run_dir: str) -> dict[str, float | str]:
        return json.loads((self.folder / run_dir / "result.json").read_text(encoding="utf-8"))


def cookiecutter(output: Path, **answers: str) -> subprocess.CompletedProcess[str]:
    """Renders the template into `output`, away from the developer's own cookiecutter settings."""
    asked = json.loads((TEMPLATE / "cookiecutter.json").read_text(encoding="utf-8"))
    unknown = [name for name in answers if name not in asked]
    assert not unknown, f"cookiecutter ignores answers to questions it does not ask: {unknown}"
    # Caches that a developer's tools left in the template's folder would be rendered too.
    template = output.parent / f"{output.name}.template"
    ignored = shutil.ignore_patterns(".git", ".venv*", "build", "runs", "__pycache__", ".*_cache")
    shutil.copytree(TEMPLATE, template, ignore=ignored)
    config = output.parent / f"{output.name}.cookiecutterrc"
    config.write_text(f"replay_dir: {json.dumps(str(output.parent / 'replay'))}\n", encoding="utf-8")
    given = [f"{name}={value}" for name, value in answers.items()]
    command = ["cookiecutter", "--no-input", "--config-file", config, "--output-dir", output, template, *given]
    output.mkdir(exist_ok=True)
    return run(*command, folder=output)


def rendered(output: Path, **answers: str) -> Bake:
    """Renders the template into `output`; returns the project."""
    done = cookiecutter(output, **answers)
    assert done.returncode == 0, done.stderr
    (folder,) = output.iterdir()
    return Bake(folder)
