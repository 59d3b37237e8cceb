"""AGENTS.md of the project: its commands exist, and what it says is what the code says."""

import ast
import re
import shlex

from pages import sections
from rendering import PROJECT, Bake, run

PAGE = (PROJECT / "AGENTS.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"`((?:python|pip|ruff|mypy|pytest)\b[^`]*)`", PAGE)


def test_commands_are_there_and_their_flags_are_read() -> None:
    programs = [shlex.split(command) for command in COMMANDS]
    trains = [words[2:] for words in programs if words[:2] == ["python", "train.py"]]
    assert len(trains) == 3
    code = f"import config, engine.command_line as c; [c.read_settings(config.Config, each) for each in {trains}]"
    done = run("python", "-c", code, folder=PROJECT)
    assert done.returncode == 0, done.stdout + done.stderr
    # What the dev extra installs.
    assert {words[0] for words in programs} == {"python", "pip", "ruff", "mypy", "pytest"}
    for tool in ("ruff", "mypy", "pytest"):
        assert run("python", "-m", tool, "--version", folder=PROJECT).returncode == 0


def test_marks_and_files_that_it_names_are_there(default_bake: Bake) -> None:
    for mark in ("TODO(you)", "KEEP"):
        assert f"`{mark}`" in PAGE
        assert f"# {mark}" in (PROJECT / "task.py").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.(?:py|md)|[\w/]+/)`", PAGE)) - {"__init__.py"}
    assert named >= {"task.py", "config.py", "train.py", "engine/", "README.md"}
    assert [name for name in named if not (default_bake.folder / name).exists()] == []


def test_exit_codes_are_those_of_the_code() -> None:
    errors = ast.parse((PROJECT / "engine/errors.py").read_text(encoding="utf-8"))
    assigned = [each for each in ast.walk(errors) if isinstance(each, ast.Assign)]
    codes = {each.value.value for each in assigned if ast.unparse(each.targets[0]) == "exit_code"}
    table = re.findall(r"(?m)^\| (\d+) \| (\w+)", sections("troubleshooting.md")["Exit codes"])
    assert {int(code) for code, _ in table} == codes | {0, 130}  # 130 is the shell's for Ctrl-C.
    assert len(codes) == 6
    said = re.findall(r"(?:Exit code |[.] )(\d+): (\w+)", PAGE)
    assert len(said) == 2
    assert set(said) <= set(table)
