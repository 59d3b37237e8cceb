"""What the console shows at the end of a run, and of a run that has ended."""

import dataclasses
import datetime
import shlex
from pathlib import Path
from typing import Any

import rich.panel
import rich.text

from engine.console import columns, console, digits, print_facts

TITLE = "Result, of the best weights"
NO_TEST = "none: task.load_examples('test') returned None"


def print_result(result: dict[str, Any], settings: Any) -> None:
    """Prints the test, the best epoch, where the files are, and what to type next: in a terminal, in a panel.

    `result` is what result.json holds. The elements of arrays, "test/f1/3", are left to it.
    """
    facts = _facts(result, settings)
    if not console.is_terminal:
        print_facts(TITLE, facts)
        return
    rows = []
    for name, value in facts.items():
        style = "bold" if name.startswith(("test", "next")) else ""
        if name == "weights_sha256":
            value = f"{value[:16]}..."  # result.json has all of it.
        rows.append((rich.text.Text(name, style="cyan"), rich.text.Text(value, style=style)))
    panel = rich.panel.Panel(columns(rows), title=rich.text.Text(TITLE, style="bold"), title_align="left", expand=False)
    console.print(panel, soft_wrap=False)


def _facts(result: dict[str, Any], settings: Any) -> dict[str, str]:
    test = {name: value for name, value in result.items() if name.split("/")[0] == "test" and value is not None}
    shown = {name: digits(value) for name, value in test.items() if not name.rsplit("/", 1)[-1].isdecimal()}
    run_dir, monitor = settings.run_dir, settings.monitor
    best = f"{result.get('best_epoch')} of {result['epochs']}, {monitor} {digits(result.get(f'best_{monitor}'))}"
    files = ["result.json", "metrics.csv", "curves.png", "best/", "checkpoints/", *["export/"] * settings.export]
    commands = {
        # A title of its own for each, so that a line can be copied.
        "next: export": f"python train.py --export{_run_dir_flag(settings)}",
        "next: predict": f"python predict.py {shlex.quote(str(run_dir))} EXAMPLES",
        "next: curves": f"tensorboard --logdir {shlex.quote(str(_folder_of_runs(run_dir)))}",
    }
    if settings.export:
        del commands["next: export"]
    return {
        **(shown if test else {"test": NO_TEST}),
        **({"test, arrays": f"{len(test) - len(shown)} numbers in result.json"} if len(test) > len(shown) else {}),
        "best epoch": best,
        "trained": f"{result['step']:,} steps in {_duration(result['seconds'])}",
        "weights_sha256": result["weights_sha256"],
        "files": f"{run_dir}: {', '.join(files)}",
        **commands,
    }


def _duration(seconds: float) -> str:
    """Returns "4.2 s", or from a minute on "1:02:03"."""
    return f"{seconds:.1f} s" if seconds < 60 else str(datetime.timedelta(seconds=round(seconds)))


def _run_dir_flag(settings: Any) -> str:
    """Returns the --run-dir that a command needs; none if it is the default."""
    defaults = [each.default for each in dataclasses.fields(settings) if each.name == "run_dir"]
    return "" if settings.run_dir in defaults else f" --run-dir {shlex.quote(str(settings.run_dir))}"


def _folder_of_runs(run_dir: Path) -> Path:
    """Returns the folder in which TensorBoard finds this run and its neighbours; the run itself if it is here."""
    return run_dir if run_dir.parent == Path() else run_dir.parent
