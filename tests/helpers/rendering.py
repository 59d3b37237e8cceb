"""Renders the template as a user would, and runs what came out."""

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from cookiecutter.main import cookiecutter
from programs import run_program

TEMPLATE = Path(__file__).parents[2]
PROJECT = TEMPLATE / "{{cookiecutter.project_slug}}"
TASKS = TEMPLATE / "tests/tasks"
ANSWERS = json.loads((TEMPLATE / "cookiecutter.json").read_text(encoding="utf-8"))
STARTERS = ANSWERS["starter"]

# Calls main functions of a project, one after another, and prints what each ends with and writes.
CALLS = """
import contextlib, importlib, io, json

calls = json.loads(sys.argv.pop())
modules = {name: importlib.import_module(name) for name, *_ in calls}
for name, *arguments in calls:
    sys.argv[1:], code, written = arguments, 0, io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
        try:
            modules[name].main(*([arguments] if name == "train" else []))
        except SystemExit as ended:
            code = ended.code
    print("called", json.dumps([code, written.getvalue()]))
"""

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

    def run_code(self, code: str, *arguments: str | Path) -> str:
        """Runs a program that imports from the project, as a fork too; returns what it prints."""
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder, "program.py")
            program.write_text(f"import os, sys\nsys.path.insert(0, os.getcwd())\n{code}", encoding="utf-8")
            return self.run("python", program, *arguments).stdout

    def call(self, *calls: list[str]) -> list[tuple[int, list[str]]]:
        """Calls main of some modules with arguments, in one process; returns the exit code and the lines of each."""
        lines = self.run_code(CALLS, json.dumps(calls)).splitlines()
        ended = [json.loads(line.removeprefix("called ")) for line in lines if line.startswith("called ")]
        assert len(ended) == len(calls)
        return [(code, written.splitlines()) for code, written in ended]

    def read(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")

    def replace(self, name: str, before: str, after: str) -> None:
        """Replaces a text that occurs once in a file."""
        assert self.read(name).count(before) == 1, before
        (self.folder / name).write_text(self.read(name).replace(before, after), encoding="utf-8")

    def files(self) -> set[str]:
        return {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if path.is_file()}

    def result(self, run_dir: str | Path) -> dict[str, float | str]:
        return json.loads((self.folder / run_dir / "result.json").read_text(encoding="utf-8"))


@functools.cache
def _prepared() -> tuple[tempfile.TemporaryDirectory, Path, Path]:
    """Copies what cookiecutter reads, without caches of a developer's tools, and makes settings that are not his."""
    folder = tempfile.TemporaryDirectory()
    template, config = Path(folder.name, "template"), Path(folder.name, "settings.yaml")
    ignored = shutil.ignore_patterns("build", "runs", "__pycache__", ".*_cache")
    for name in (PROJECT.name, "hooks"):
        shutil.copytree(TEMPLATE / name, template / name, ignore=ignored)
    for name in ("cookiecutter.json", "reject_answers.py"):
        shutil.copy(TEMPLATE / name, template)
    config.write_text(f"replay_dir: {json.dumps(str(Path(folder.name, 'replay')))}\n", encoding="utf-8")
    return folder, template, config


def check_names(answers: dict[str, str]) -> None:
    unknown = [name for name in answers if name not in ANSWERS]
    assert not unknown, f"cookiecutter ignores answers to questions it does not ask: {unknown}"


def rendered(output: Path, *, accept_hooks: bool = True, update: bool = False, **answers: str) -> Bake:
    """Renders the template into `output`, in this process; returns the project. Raises what cookiecutter raises.

    An `update` renders over a project that is there.
    """
    check_names(answers)
    _, template, config = _prepared()
    output.mkdir(exist_ok=True)
    options = {"config_file": str(config), "output_dir": str(output), "accept_hooks": accept_hooks}
    options |= {"overwrite_if_exists": update}
    return Bake(Path(cookiecutter(str(template), no_input=True, extra_context=answers, **options)))


def run_cookiecutter(output: Path, *replay: str | Path, **answers: str) -> subprocess.CompletedProcess[str]:
    """Renders the template into `output` by the command line, with answers or the options of a `replay`."""
    check_names(answers)
    _, template, config = _prepared()
    output.mkdir()
    given = [f"{name}={value}" for name, value in answers.items()]
    options = [*(replay or ["--no-input"]), "--config-file", config, "--output-dir", output]
    return run("cookiecutter", *options, template, *given, folder=output)
