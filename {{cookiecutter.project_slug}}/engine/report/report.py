"""Console output, metrics.csv, TensorBoard and curves.png. Of several workers only the chief reports.

metrics.csv is the source; the other three show the same numbers. A resumed run keeps the rows up to the epoch it
continues from, and writes the rest again.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

from engine.console import console
from engine.mistakes import first_line, where_raised
from engine.model.metrics import Names
from engine.report.curves import draw_curves
from engine.report.lines import Lines
from engine.report.rows import is_metric, read_rows, write_rows
from engine.report.summaries import TENSORBOARD, Summaries

# curves.png is drawn at the end of a run and, in between, at most this often: TensorBoard is the live view.
SECONDS_BETWEEN_CURVES = 30.0
VALIDATIONS = "validations.csv"
# A share of the training time. Above it, and above a second, waiting for batches is worth a line.
MUCH_WAITING = 0.1


class Report:
    """One row per epoch, to everywhere; and one per validation between the ends of epochs, to validations.csv."""

    def __init__(self, run_dir: Path, names: Names, *, epochs: int, monitor: str = "") -> None:
        """Reads and writes nothing; `open` does. `names` are the metrics', and `monitor` is the first one shown."""
        self.run_dir = run_dir
        self.names = names
        self.epochs = epochs
        self._lines = Lines(names, monitor, rest=f"{run_dir / 'metrics.csv'}")
        self._summaries = Summaries(run_dir / TENSORBOARD)
        self._on_report_failed = False
        self._waiting_is_reported = True  # So the first epoch, in which the pipeline fills, is passed over.

    def open(self, *, epochs_done: int, validated_step: int) -> None:
        """Continues the report in `run_dir` after `epochs_done` epochs and a validation after step `validated_step`."""
        path = self.run_dir / "metrics.csv"
        self.rows = [row for row in read_rows(path) if row["epoch"] <= epochs_done]
        if lacking := epochs_done - len(self.rows):
            console.print(f"{path} lacks {lacking} of {epochs_done} epochs")
        validations = read_rows(self.run_dir / VALIDATIONS, key="step")
        self.validations = [row for row in validations if row["step"] <= validated_step]
        self._curves_drawn = time.monotonic()

    def epoch(self, row: dict[str, Any], *, is_best: bool, waited: float = 0.0) -> None:
        """Reports one epoch. `row` has the keys COLUMNS and "<split>/<metric>".

        `waited` is the share (0 to 1) of the training time in which there were no batches.
        """
        self.rows.append(row)
        metrics = {name: value for name, value in row.items() if is_metric(name)}
        rates = {name: value for name, value in row.items() if name.split("/")[0] == "learning_rate"}
        speed = row["examples_per_second"]
        start = f"epoch {row['epoch']:>{len(str(self.epochs))}}/{self.epochs}"
        ends = [f"{row['seconds']:.1f} s", f"{speed:7,.0f} examples/s"]
        if waited > MUCH_WAITING:
            ends.append(f"waited {100 * waited:.0f} %")
        self._lines.print(start, metrics, *ends, is_best=is_best)
        is_much = waited > MUCH_WAITING and waited * row["seconds"] > 1.0
        if is_much and not self._waiting_is_reported:
            console.print(
                f"{100 * waited:.0f} % of the training time went into waiting for batches: make task.prepare_example "
                "cheaper, or cache its results; read fewer and larger files; or give the program more CPU cores"
            )
        self._waiting_is_reported = is_much
        shown = self.names.scalars(metrics)
        self._summaries.add(row["step"], {"waited": waited, **rates, "examples_per_second": speed, **shown})
        write_rows(self.run_dir / "metrics.csv", self.rows)
        if time.monotonic() - self._curves_drawn > SECONDS_BETWEEN_CURVES:
            self.draw_curves()

    def call_hook(
        self, on_report: Callable[..., None], row: dict[str, Any], settings: Any, strategy: tf.distribute.Strategy
    ) -> None:
        """Calls task.on_report, whose summaries go to TensorBoard. What it raises is printed once, and ends nothing."""
        # The chief is alone here. As one replica it reads variables without asking the other processes.
        replica = tf.distribute.ReplicaContext(strategy, replica_id_in_sync_group=0)
        with self._summaries.at(row["step"]):
            try:
                with replica:
                    on_report(dict(row), self.run_dir, settings)
            except Exception as problem:  # noqa: BLE001 - A picture is not worth the run.
                if not self._on_report_failed:
                    what = f"{where_raised(problem)}: {first_line(problem)}"
                    console.print(f"task.on_report failed ({what}); the run goes on")
                self._on_report_failed = True

    def validation(self, step: int, metrics: dict[str, float], *, is_best: bool) -> None:
        """Reports one validation between the ends of epochs: `metrics` as "<set>/<metric>"."""
        self.validations.append({"step": step, **metrics})
        self._lines.print(f"step {step}", metrics, is_best=is_best)
        self._summaries.add(step, self.names.scalars(metrics))
        write_rows(self.run_dir / VALIDATIONS, self.validations)

    def draw_curves(self) -> None:
        """Draws curves.png: one panel per metric, its sets over the epochs. Nothing, if there are no rows."""
        if self.rows:
            draw_curves(self.run_dir, self.names, self.rows)
            self._curves_drawn = time.monotonic()
