"""Makes the project's docs/calls.md from docstrings, in the template's environment: make settings."""

import ast
from pathlib import Path

TEMPLATE = Path(__file__).parents[1]
PROJECT = TEMPLATE / "{{cookiecutter.project_slug}}"
PAGE = PROJECT / "docs" / "calls.md"

HEAD = """# What your code may call

The first sentence of each docstring; the rest is in the file, or in `help()` of Python."""
TAIL = """
## Hooks that task.py need not have

| Hook | What it is for |
|---|---|
| `predict_step(features)` | predictions, for `--export` and `predict.py`: [inference](inference.md) |
| `read_inputs(path)` | examples without labels, for `predict.py`: [inference](inference.md) |
| `on_report(row, run_dir, settings)` | pictures, texts and trackers after an epoch: [training](training.md) |
| `data_files()` | files beside the examples, which a run must find again: [data](data.md#files-beside-the-examples) |
| `user_state` | what the task keeps in checkpoints: [data that change](changing_data.md) |
"""
OF_STEPS = ("averages", "global_batch", "gradients", "metrics")  # Modules of engine/model.
NOT_OF_STEPS = ("TaskObjects", "replica_step")
OF_EPOCHS = ("train_epoch", "evaluate_split", "validate_and_keep_best")
OF_RUN = ("epoch", "starts_epoch", "should_continue", "user_state", "reload", "evaluation_weights", "save_if_best")
OF_RUN += ("end_epoch", "save", "on_any_worker", "stop_if_asked")


def page() -> str:
    """Returns the whole page."""
    exported = ast.literal_eval(_assigned(PROJECT / "engine/model/__init__.py", "__all__"))
    of_steps = [name for name in exported if name not in NOT_OF_STEPS]
    steps = {}
    for module in OF_STEPS:
        steps |= _definitions(PROJECT / f"engine/model/{module}.py", of_steps)
    run = _definitions(PROJECT / "engine/run/training.py", OF_RUN, of_class="Run")
    records = _definitions(PROJECT / "engine/data/records.py", ["Records"])
    parts = {
        "In a step: `from engine.model import ...`": {name: steps[name] for name in of_steps},
        "In load_examples: `from engine.data import ...`": records,
        "In run_epochs of train.py": _definitions(PROJECT / "train.py", OF_EPOCHS)
        | {f"run.{name}": run[name] for name in OF_RUN},
    }
    lines = [HEAD]
    for title, calls in parts.items():
        lines += [f"\n## {title}\n", "| Call | What it does |", "|---|---|"]
        lines += [f"| `{name}{arguments}` | {text} |" for name, (arguments, text) in calls.items()]
    return "\n".join(lines) + "\n" + TAIL


def _assigned(file: Path, name: str) -> ast.expr:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return node.value
    raise LookupError(f"{file} assigns no {name}")


def _definitions(file: Path, names: "list[str] | tuple[str, ...]", of_class: str = "") -> dict[str, tuple[str, str]]:
    """Returns the arguments, and the first sentence of the docstring, of functions and classes, by name."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    if of_class:
        (body,) = (node.body for node in body if isinstance(node, ast.ClassDef) and node.name == of_class)
    found = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names:
            text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            found[node.name] = _arguments(node), text.split(". ")[0].removesuffix(".") + "."
    return found


def _arguments(node: ast.FunctionDef | ast.ClassDef) -> str:
    if isinstance(node, ast.ClassDef):
        (node,) = (part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__")
    elif any(ast.unparse(decorator) == "property" for decorator in node.decorator_list):
        return ""
    names = [argument.arg for argument in node.args.args + node.args.kwonlyargs if argument.arg != "self"]
    more = [f"*{node.args.vararg.arg}"] if node.args.vararg else []
    return f"({', '.join([*more, *names])})"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
