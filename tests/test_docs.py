"""The pages: made from the code where they can be, and what they name, link to or count is there."""

import ast
import functools
import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

from pages import PAGES, sections
from rendering import PROJECT, STARTERS, TEMPLATE, Bake, run


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


# --- Links and names --------------------------------------------------------------------------------------------------


def prose(page: Path) -> str:
    """Returns a page without its blocks of code."""
    return re.sub(r"(?ms)^```.*?^```", "", read(page))


@functools.cache
def anchors(page: Path) -> set[str]:
    """Returns the anchors that GitHub makes of a page's headings."""
    titles = re.findall(r"(?m)^#+ (.*)$", prose(page))
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(TEMPLATE).as_posix())
def test_links_and_names_of_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            assert re.fullmatch(r"https://[\w.-]+(/[\w./%#?=&~-]*)?", target), target
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target
    for name in re.findall(r"\b(?:engine|tests|deploy|benchmarks|docs|hooks)/[\w/]+(?:\.\w+)?", read(page)):
        assert (TEMPLATE / name).exists() or (PROJECT / name).exists(), name


# Settings of a reader's own, which pages add to config.py.
OF_READERS = {"users", "teacher", "freeze-encoder", "lora-rank"}


def test_flags_in_commands_are_settings() -> None:
    known = set(re.findall(r"--([a-z0-9-]+)", read(PROJECT / "docs/settings.md"))) | OF_READERS
    for path in PROJECT.rglob("config.py"):
        known |= {name.replace("_", "-") for name in re.findall(r"(?m)^    (\w+):", read(path))}
    for page in PAGES:
        for command in re.findall(r"python train\.py([^`\n]*)", read(page)):
            assert set(re.findall(r" --([a-z][a-z0-9-]*)", command)) <= known, (page, command)


@functools.cache
def functions(path: Path) -> set[str]:
    return {each.name for each in ast.parse(read(path)).body if isinstance(each, ast.FunctionDef)}


def assert_tests_are_there(text: str, least: int) -> None:
    """Checks that the tests that a page names, at least so many, are tests of the template or of the project."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", text)
    assert len(named) == text.count("::") >= least
    for file, name in named:
        (path,) = (folder / file for folder in (TEMPLATE, PROJECT) if (folder / file).exists())
        assert name in functions(path), f"{file}::{name}"


def test_every_guarantee_names_tests_that_there_are() -> None:
    text = read(TEMPLATE / "docs/guarantees.md")
    *sections, untested = re.split(r"(?m)^## ", text)[1:]
    assert untested.startswith("Untested\n")
    tests = r"(?:- `tests/[\w/]+\.py::\w+`\n?)+"
    for section in sections:
        paragraphs = [each for each in re.split(r"\n\n+", section)[1:] if each.strip()]
        assert re.fullmatch(tests, paragraphs[-1]) or "](" in paragraphs[-1], paragraphs[-1]
        for said, follows in itertools.pairwise(paragraphs):
            # A link leads to a page with tests or figures of its own; a colon, to a list and its tests.
            is_named = re.fullmatch(tests, follows) or "](" in said or said.endswith(":")
            assert said.startswith("- `") or is_named, said
    assert_tests_are_there(text, least=60)


def test_every_pitfall_names_tests_that_there_are() -> None:
    text = read(TEMPLATE / "docs/pitfalls.md")
    pitfalls = re.findall(r"(?ms)^- \*\*.*?(?=^- |^\n|^#)", text)
    assert len(pitfalls) == len(re.findall(r"(?m)^- ", text)) > 50
    for pitfall in pitfalls:
        assert re.match(r"(?s)- \*\*.+?\*\*\s+\*(Silent|Error|Hang|Slow)\b", pitfall), pitfall
        assert re.search(r"(?:\n  `tests/[\w/]+\.py::\w+`)+\n\Z", pitfall), pitfall
    assert_tests_are_there(text, least=50)


def test_number_of_planted_faults_is_that_of_the_test() -> None:
    planted = 0
    for path in (TEMPLATE / "tests/engine/check").glob("test_*.py"):
        code = ast.parse(read(path))
        assigned = {ast.unparse(each.targets[0]): each.value for each in code.body if isinstance(each, ast.Assign)}
        planted += len(assigned["FAULTS"].keys) if "FAULTS" in assigned else 0
    for page in ("README.md", "docs/guarantees.md"):
        assert f"finds {planted} planted faults" in read(TEMPLATE / page), page


# --- What the code says -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["settings", "calls"])
def test_pages_that_are_made_from_the_code_are_up_to_date(page: str) -> None:
    program = f"import sys; sys.path.insert(0, 'docs'); import make_{page}; print(make_{page}.page(), end='')"
    made = subprocess.run([sys.executable, "-c", program], check=True, cwd=TEMPLATE, capture_output=True, text=True)
    assert read(PROJECT / f"docs/{page}.md") == made.stdout, "run make settings"


def messages(folder: Path) -> str:
    """Returns the literals in the project's code but docstrings, one a line, with a NUL where a value is put in."""
    texts = []
    for file in folder.rglob("*.py"):
        nodes = [*ast.walk(ast.parse(read(file)))]
        docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr | ast.Constant) and node not in docstrings:
                pieces = node.values if isinstance(node, ast.JoinedStr) else [node]
                texts.append("".join(str(piece.value) if isinstance(piece, ast.Constant) else "\0" for piece in pieces))
    return "\n".join(texts)


def test_texts_in_troubleshooting_are_those_of_the_code() -> None:
    ours, _, theirs = read(PROJECT / "docs/troubleshooting.md").partition("## From TensorFlow")
    quoted = re.findall(r"\*\*`([^`]*)`\*\*", ours)
    assert len(quoted) == ours.count("**`") > 60
    assert "**`" not in theirs
    texts = messages(PROJECT)
    for text in quoted:
        pattern = ".*".join(map(re.escape, re.split(r" ?\.\.\. ?", " ".join(text.split()))))
        assert re.search(pattern, texts), text


def test_page_for_agents_has_commands_that_are_read_files_and_exit_codes_that_there_are(default_bake: Bake) -> None:
    page = read(PROJECT / "AGENTS.md")
    programs = [shlex.split(command) for command in re.findall(r"`((?:python|pip|ruff|mypy|pytest)\b[^`]*)`", page)]
    trains = [words[2:] for words in programs if words[:2] == ["python", "train.py"]]
    assert len(trains) == 3
    code = f"import config, engine.command_line as c; [c.read_settings(config.Config, each) for each in {trains}]"
    done = run("python", "-c", code, folder=PROJECT)
    assert done.returncode == 0, done.stdout + done.stderr
    for mark in ("TODO(you)", "KEEP"):
        assert f"`{mark}`" in page
        assert f"# {mark}" in read(PROJECT / "task.py")
    named = set(re.findall(r"`([\w/]+\.(?:py|md)|[\w/]+/)`", page)) - {"__init__.py"}
    assert named >= {"task.py", "config.py", "train.py", "engine/", "README.md"}
    assert [name for name in named if not (default_bake.folder / name).exists()] == []

    codes = set(map(int, re.findall(r"(?m)^    exit_code\b.* = (\d+)$", read(PROJECT / "engine/errors.py"))))
    table = re.findall(r"(?m)^\| (\d+) \| (\w+)", sections("troubleshooting.md")["Exit codes"])
    assert {int(code) for code, _ in table} == codes | {0, 130}  # 130 is the shell's for Ctrl-C.
    said = re.findall(r"(?:Exit code |[.] )(\d+): (\w+)", page)
    assert len(said) == 2
    assert set(said) <= set(table)


# --- The READMEs ------------------------------------------------------------------------------------------------------


def code_of(starter: str) -> dict[str, str]:
    """Returns the Python files of a starter's project by their names."""
    own = PROJECT / "starters" / starter
    shared = (path for path in PROJECT.rglob("*.py") if PROJECT / "starters" not in path.parents)
    paths = {path.relative_to(PROJECT): path for path in shared}
    paths |= {path.relative_to(own): path for path in own.rglob("*.py")}
    # The search comes last, because it needs a task.
    names = sorted(paths, key=lambda name: (name.name == "sweep.py", name))
    return {str(name): read(paths[name]) for name in names}


@pytest.mark.parametrize("starter", STARTERS)
def test_readme_lists_the_todo_hooks_in_file_order(starter: str) -> None:
    marked = [
        (file, re.findall(r"^(?:def|class) (\w+)", code[: found.start()], re.MULTILINE)[-1], found[1])
        for file, code in code_of(starter).items()
        for found in re.finditer(r"^ *# TODO\(you\): (.*)$", code, re.MULTILINE)
    ]
    assert 0 < len(marked) <= 10
    assert re.findall(r"(?m)^\| `(\w+\.py)` \| `([^`]+)` \| (.*) \|$", read(PROJECT / "README.md")) == marked


def test_readmes_show_the_tree_the_pages_and_the_step_that_there_are() -> None:
    readme = read(PROJECT / "README.md")
    (tree,) = re.findall(r"(?ms)^```\n(train\.py .*?)^```", readme)
    folders = (path for path in PROJECT.glob("[a-z]*") if path.is_dir() and path.name not in ("runs", "starters"))
    there = {path.name for path in PROJECT.glob("[a-z]*.py")} | {f"{path.name}/" for path in folders}
    assert set(re.findall(r"(?m)^(\S+) ", tree)) == there
    assert set(re.findall(r"\]\(docs/(\w+\.md)\)", readme)) == {page.name for page in PROJECT.glob("docs/*.md")}
    (step,) = re.findall(r"(?ms)^```python\n(def train_step.*?)^```", read(TEMPLATE / "README.md"))
    assert step in read(PROJECT / "task.py")


@pytest.mark.parametrize("version", ["2.20.0", "2.21.0"])
def test_speeds_are_those_of_the_results(version: str) -> None:
    results = read(TEMPLATE / "benchmarks/results/results.md")
    (table,) = re.findall(rf"(?ms)^## Training steps/s, TensorFlow {version}\n\n(.*?)\n\n", results)
    assert table.count("\n") >= 9
    assert table in read(TEMPLATE / "docs/speed.md")


# Words that people search for. Each is on a page of the project.
SEARCHED = """
    active learning, AUC, augmentation, batch normalization, BERT, callbacks, class weights, contrastive, CTC, CUDA,
    data larger than memory, detection, deterministic, diffusion, distillation, Docker, dropout, early stopping, EMA,
    embedding, export, F1, fine-tuning, forecasting, freeze, GAN, GNN, GPU is not used, gradient accumulation,
    gradient clipping, hang, hyperparameter, imbalanced, Kubernetes, learning rate schedule, LoRA, missing values,
    mixed precision, multi-label, multi-worker, NaN, NCCL, ONNX, out of memory, preempt, quantile, ragged, random seed,
    Ray, ReduceLROnPlateau, reinforcement learning, resume, segmentation, Slurm, slow, speech, TensorBoard, TFRecord,
    TPU, transfer learning, two towers, unfreezing, warm-up, Weights & Biases, windows, XLA
"""


@pytest.mark.parametrize("word", re.split(r",\s+", SEARCHED.strip()))
def test_words_that_people_search_for_are_on_a_page(word: str) -> None:
    pattern = r"\b" + re.escape(word).replace(r"\ ", r"\s+")
    assert any(re.search(pattern, prose(page), re.IGNORECASE) for page in PROJECT.glob("docs/*.md"))


# --- The notebook -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_notebook_runs_and_finds_the_planted_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(TEMPLATE / "docs/colab.ipynb", as_version=4)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    monkeypatch.setenv("TF_DIST_TEMPLATE", str(TEMPLATE))
    monkeypatch.chdir(tmp_path)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.create_kernel_manager()
    client.km.kernel_cmd = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    client.execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "mirrored 4 replica(s) 4 simulated on" in printed
    assert printed.count("checks failed") == 1
    assert re.search(r"All \d+ checks passed\.", printed)
