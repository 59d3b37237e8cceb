"""Console output, metrics.csv, steps.csv, TensorBoard and curves.png. Of several workers only the chief reports.

metrics.csv is the source; the others show the same numbers, and steps.csv what lies between. A resumed run keeps the
rows up to the epoch and the step it continues from, and writes the rest again.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from engine.console import Lines, console
from engine.model.metrics import ResultNames
from engine.report.curves import draw_curves
from engine.report.steps import STEPS, Steps
from engine.report.summaries import TENSORBOARD, Summaries
from engine.report.tables import is_metric, read_rows, write_rows
from engine.user_errors import first_line, where_raised

# curves.png is drawn at the end of a run and, in between, at most this often: TensorBoard is the live view.
SECONDS_BETWEEN_CURVES = 30.0
VALIDATIONS = "validations.csv"
# A share of the training time. Above it, and above a second, waiting for batches is worth a line.
MUCH_WAITING = 0.1


class Report:
    """One row per epoch, to everywhere; and one per validation between the ends of epochs, to validations.csv."""

    def __init__(
        self,
        run_dir: Path,
        names: ResultNames,
        *,
        epochs: int,
        monitor: str = "validation/loss",
        direction: str = "min",
    ) -> None:
        """Reads and writes nothing; `open` does.

        `names` are those of the metrics; `direction` ("min" or "max") says which score of `monitor` is the best.
        """
        self.run_dir = run_dir
        self.names = names
        self.epochs = epochs
        self._monitored = {"monitor": monitor, "direction": direction}
        self._resumed: Sequence[int] = ()
        self._lines = Lines(names, monitor, rest=f"{run_dir / 'metrics.csv'}")
        self._steps = Steps(run_dir / STEPS)
        self._summaries = Summaries(run_dir / TENSORBOARD, names)
        self._on_report_failed = False
        self._waiting_is_reported = True  # So the first epoch, in which the pipeline fills, is passed over.

    def open(
        self,
        *,
        epochs_done: int,
        validated_step: int,
        step: int | None = None,
        resumed: Sequence[int] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Continues the report in `run_dir`.

        Args:
            epochs_done: it goes on after so many epochs,
            validated_step: a validation after this step,
            step: and this step.
            resumed: the steps after which the run was resumed.
            settings: what to show of the run in TensorBoard.
        """
        path = self.run_dir / "metrics.csv"
        self.rows = [row for row in read_rows(path) if row["epoch"] <= epochs_done]
        if lacking := epochs_done - len(self.rows):
            console.print(f"{path} lacks {lacking} of {epochs_done} epochs")
        validations = read_rows(self.run_dir / VALIDATIONS, key="step")
        self.validations = [row for row in validations if row["step"] <= validated_step]
        self._resumed = resumed
        self._curves_drawn = time.monotonic()
        if step is not None:
            self._steps.open(step)
            self._summaries.cut(step)
            self._summaries.settings(step, settings or {})

    def steps(
        self, step: int, epoch: int, losses: np.ndarray, seconds: float, latest: Callable[[], dict[str, float]]
    ) -> None:
        """Counts a chunk of training steps that ends with `step`; about once a second they get a row of steps.csv.

        Args:
            step: counted from 1, over all epochs.
            epoch: counted from 1.
            losses: that of each step, [count].
            seconds: what the steps took.
            latest: returns the other columns as they are now; it is called when a row is due.
        """
        self._last_steps = (step, epoch, latest)
        if self._steps.add(losses, seconds):
            self._end_row()

    def _end_row(self) -> None:
        step, epoch, latest = self._last_steps
        row = self._steps.row(step, epoch, latest())
        shown = {f"steps/{name}": value for name, value in row.items() if name not in ("step", "epoch")}
        self._summaries.add(step, {name: value for name, value in shown.items() if value is not None})

    def end(self) -> None:
        """Writes what is left: a run has ended, or reaches the last of its epochs."""
        if not self._steps.is_empty:
            self._end_row()
        self.draw_curves()

    def result(self, step: int, metrics: Mapping[str, float], best: float) -> None:
        """Shows the test metrics of a run that has ended, and its best score, in TensorBoard."""
        self._summaries.add(step, {**self.names.scalars(metrics), f"best/{self._monitored['monitor']}": best})

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
        """Draws curves.png. Nothing, if there are no rows."""
        if self.rows:
            validations, resumed = self.validations, self._resumed
            draw_curves(
                self.run_dir, self.names, self.rows, validations=validations, resumed=resumed, **self._monitored
            )
            self._curves_drawn = time.monotonic()
