"""Console output, metrics.csv, steps.csv, TensorBoard and curves.png. Of several workers only the chief reports.

A resumed run keeps the rows up to the epoch and the step it continues from, and writes the rest again.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf
from rich.text import Text

from engine.console import console, digits
from engine.errors import first_line, where_raised
from engine.model.metrics import ResultNames
from engine.report.curves import CURVES, figure_of_run, write_figure
from engine.report.summaries import TENSORBOARD, Summaries
from engine.report.tables import Row, append_row, cut_rows, is_metric, keep_rows
from engine.settings import Settings

METRICS = "metrics.csv"
VALIDATIONS = "validations.csv"
STEPS = "steps.csv"
SECONDS_BETWEEN_CURVES = 30.0  # curves.png is drawn at most this often, and at the end of a run.
SECONDS_PER_ROW = 1.0  # A row of steps.csv covers at least this time; an execution may be far shorter.
SECONDS_TO_TELL = 1.0  # The time of task.on_report is reported above this.
MUCH_WAITING = 0.1  # Waiting for batches is reported above this fraction of the training time, and above a second.
SEPARATOR = " / "  # Between the values of a metric on several datasets.
METRICS_WIDTH = 70  # Columns of a line that metrics may take; with the rest of an epoch's line they are about 120.


class Report:
    """Reports epochs and validations to all outputs, and about one row of steps a second."""

    def __init__(
        self,
        settings: Settings,
        names: ResultNames,
        direction: str,
        *,
        epochs_done: int,
        validated_step: int,
        step: int,
        resumed: list[int],
    ) -> None:
        """Keeps the reports in --run-dir up to the epoch, the validation and the step that a run continues from.

        The best score is the "min" or the "max" (`direction`). `resumed` are the steps from which the run was resumed.
        """
        self.settings, self.run_dir, self.names = settings, settings.run_dir, names
        path = self.run_dir / METRICS
        self.rows = keep_rows(path, epochs_done)
        if missing := epochs_done - len(self.rows):
            console.print(f"{path} lacks {missing} of {epochs_done} epochs")
        self.validations = keep_rows(self.run_dir / VALIDATIONS, validated_step, key="step")
        cut_rows(self.run_dir / STEPS, step)
        self._summaries = Summaries(self.run_dir / TENSORBOARD, names)
        self._summaries.cut(step)
        self._summaries.settings(step, settings.as_json())
        self._lines = Lines(names, settings.monitor, path)
        self.direction, self._resumed = direction, resumed
        self._curves_drawn = time.monotonic()
        self._sums = np.zeros(4)  # Since the last row of steps.csv: steps, their losses, full batches and seconds.
        self._on_report_failed, self._on_report_seconds = False, 0.0
        self._waiting_is_reported = True  # The first epoch, in which the pipeline fills, is not reported.

    def steps(
        self,
        step: int,
        epoch: int,
        losses: np.ndarray,
        batches: float,
        seconds: float,
        rates: Callable[[], Row],
    ) -> None:
        """Counts an execution of training steps; writes a row of steps.csv about once a second.

        `step`, the last one over all epochs, and `epoch` count from 1. `losses` are the steps' losses ([count]), whose
        mean is over `batches`, and `seconds` their time. `rates` returns the learning rates, for a row that is due.
        """
        self._sums += len(losses), np.sum(losses, dtype=np.float64), batches, seconds
        self._last_steps = step, epoch
        if self._sums[-1] >= SECONDS_PER_ROW:
            self._end_row(rates())

    def _end_row(self, rates: Row) -> None:
        step, epoch = self._last_steps
        count, loss, batches, seconds = self._sums.tolist()
        row = {"loss": loss / batches, "steps_per_second": count / max(seconds, 1e-9), **rates}
        self._sums[:] = 0.0
        append_row(self.run_dir / STEPS, {"step": step, "epoch": epoch, **row})
        self._summaries.add(step, {f"steps/{name}": value for name, value in row.items()})

    def end(self) -> None:
        """Writes the rest, after the last epoch."""
        if self._sums[0]:
            self._end_row(self._rates)
        self.draw_curves()
        if self._on_report_seconds > SECONDS_TO_TELL:
            console.print(f"task.on_report took {self._on_report_seconds:.1f} s, beside the times of the epochs.")

    def result(self, step: int, metrics: Mapping[str, float], best: float) -> None:
        """Writes the test metrics and the best score of a finished run to TensorBoard."""
        self._summaries.add(step, {**self.names.scalars(metrics), f"best/{self.settings.monitor}": best})

    def epoch(self, row: Row, *, is_best: bool, waited: float = 0.0) -> None:
        """Reports an epoch. `row` has the columns tables.COLUMNS and "<dataset>/<metric>".

        `waited` is the fraction of the training time that was spent waiting for batches.
        """
        self.rows.append(row)
        metrics = {name: value for name, value in row.items() if is_metric(name)}
        self._rates = {name: value for name, value in row.items() if name.split("/")[0] == "learning_rate"}
        speed, epochs = row["examples_per_second"], self.settings.epochs
        start = f"epoch {row['epoch']:>{len(str(epochs))}}/{epochs}"
        waiting = f"{100 * waited:.0f} %"
        ends = [f"{row['seconds']:.1f} s", f"{speed:7,.0f} examples/s"]
        ends += [f"waited {waiting}"] * (waited > MUCH_WAITING)
        self._lines.print(start, metrics, *ends, is_best=is_best)
        is_much = waited > MUCH_WAITING and waited * row["seconds"] > 1.0
        if is_much and not self._waiting_is_reported:
            console.print(
                f"{waiting} of the training time went into waiting for batches: make task.prepare_example cheaper or "
                "cache its results, use larger files, or use more CPU cores"
            )
        self._waiting_is_reported = is_much
        append_row(self.run_dir / METRICS, row, synced=True)
        shown = self.names.scalars(metrics)
        self._summaries.add(row["step"], {"waited": waited, **self._rates, "examples_per_second": speed, **shown})
        if time.monotonic() - self._curves_drawn > SECONDS_BETWEEN_CURVES:
            self.draw_curves()

    def call_hook(self, on_report: Callable[..., None], row: Row, strategy: tf.distribute.Strategy) -> None:
        """Calls task.on_report, whose summaries go to TensorBoard. Its first exception is printed and ends nothing."""
        # Only the chief calls it. In a replica's context it reads variables without the other processes.
        replica = tf.distribute.ReplicaContext(strategy, replica_id_in_sync_group=0)
        started = time.monotonic()
        try:
            with self._summaries.at(row["step"]), replica:
                on_report(dict(row), self.run_dir, self.settings)
        except KeyboardInterrupt:
            raise
        except BaseException as problem:  # noqa: BLE001 - A picture is not worth the run, nor is sys.exit() in it.
            if not self._on_report_failed:
                place, text = where_raised(problem), first_line(problem)
                console.print(f"task.on_report failed ({place}: {text}); the run continues")
            self._on_report_failed = True
        self._on_report_seconds += time.monotonic() - started

    def validation(self, step: int, metrics: dict[str, float], *, is_best: bool) -> None:
        """Reports a validation within an epoch: `metrics` as "<dataset>/<metric>"."""
        row = {"step": step, **metrics}
        self.validations.append(row)
        self._lines.print(f"step {step}", metrics, is_best=is_best)
        self._summaries.add(step, self.names.scalars(metrics))
        append_row(self.run_dir / VALIDATIONS, row, synced=True)

    def draw_curves(self) -> None:
        """Draws curves.png, if an epoch has ended."""
        if self.rows:
            figure = figure_of_run(
                self.settings, self.names, self.rows, self.validations, self._resumed, self.direction
            )
            write_figure(self.run_dir / CURVES, figure)
            self._curves_drawn = time.monotonic()


class Lines:
    """Prints the lines of epochs and validations, all with the same choice of metrics.

        Each metric as train / validation
        epoch  1/10  loss  1.985 / 0.9777  accuracy 0.2821 / 0.7318  1.8 s      791 examples/s  best

    A metric that not all datasets have is shown with its full name. The monitored metric and losses are shown first,
    others as far as they fit.
    """

    def __init__(self, names: ResultNames, monitor: str, path: Path) -> None:
        """`monitor` is the result that is always shown, `path` the file that contains all results."""
        self._names, self._monitor, self._path = names, monitor, path
        self._explained = {""}

    def print(self, start: str, metrics: Mapping[str, float], *ends: str, is_best: bool) -> None:
        """Prints a line: its start, the metrics ("<dataset>/<metric>" -> value), and its ends."""
        by_metric: dict[str, dict[str, str]] = {}
        for name, value in metrics.items():
            if name == self._monitor or name not in self._names.arrays:
                by_metric.setdefault(self._names.metric(name), {})[name] = f"{digits(value):>6}"
        datasets = dict.fromkeys(self._names.dataset(name) for values in by_metric.values() for name in values)
        texts: dict[str, str] = {}
        for metric, values in by_metric.items():
            if len(values) == len(datasets) > 1:
                texts[metric] = f"{metric} {SEPARATOR.join(values.values())}"
            else:
                texts[metric] = "  ".join(f"{name} {value}" for name, value in values.items())
        chosen: list[str] = []
        monitored = self._names.metric(self._monitor)
        for metric in sorted(texts, key=lambda metric: (metric != monitored, not metric.endswith("loss"))):
            if not chosen or len("  ".join([*chosen, texts[metric]])) <= METRICS_WIDTH:
                chosen.append(texts[metric])
        self._explain(datasets, chosen, more=len(texts) - len(chosen))
        line = Text("  ".join([start, *(text for text in texts.values() if text in chosen), *ends]))
        console.print(line.append("  best", "bold green") if is_best else line)

    def _explain(self, datasets: Iterable[str], chosen: Sequence[str], more: int) -> None:
        """Prints the legend of a line, unless it was printed before."""
        legends = [f"Each metric as {SEPARATOR.join(datasets)}"] * any(SEPARATOR in text for text in chosen)
        legends += [f"{more} more in {self._path}"] * (more > 0)
        if (legend := "; ".join(legends)) not in self._explained:
            self._explained.add(legend)
            console.print(legend, style="dim")
