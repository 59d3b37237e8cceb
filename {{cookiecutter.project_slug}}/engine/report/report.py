"""The reports of a run: lines, metrics.csv, steps.csv, TensorBoard, curves.png and goodput.json.

Of several workers only the chief reports. A resumed run keeps the rows up to the epoch and the step it continues from,
and writes the rest again.
"""

import collections
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from rich.text import Text
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

import engine
from engine.console import console, digits
from engine.errors import CannotWrite, first_line, where_raised
from engine.files import read_json, until_written, write_atomically, write_json, writing
from engine.model.metrics import ResultNames
from engine.report.curves import figure_of_run
from engine.report.tables import Row, append_row, cut_rows, is_metric, keep_rows
from engine.settings import Settings

METRICS = "metrics.csv"
VALIDATIONS = "validations.csv"
STEPS = "steps.csv"
TENSORBOARD = "tensorboard"
SECONDS_BETWEEN_CURVES = 30.0  # curves.png is drawn at most this often, and at the end of a run.
SECONDS_PER_ROW = 1.0  # A row of steps.csv covers at least this time; an execution may be far shorter.
MUCH_WAITING = 0.1  # Waiting for batches is reported above this fraction of the training time.
METRICS_WIDTH = 70  # Columns of a line that metrics may take; with the rest of an epoch's line they are about 120.


class Report:
    """Reports epochs and validations to all outputs, and about one row of steps a second."""

    def __init__(
        self, settings: Settings, names: ResultNames, direction: str, done: Mapping[str, int], resumed: list[int]
    ) -> None:
        """Keeps the reports in --run-dir up to the point from which a run continues.

        This is `done`: the number of "epochs", and the steps of the last "validation" and of the last training "step".
        The best score is the "min" or the "max" (`direction`). `resumed` are the steps from which the run was resumed.
        """
        self.settings, self.run_dir, self.names = settings, settings.run_dir, names
        self.rows = keep_rows(self.run_dir / METRICS, done["epochs"])
        self.validations = keep_rows(self.run_dir / VALIDATIONS, done["validation"], key="step")
        cut_rows(self.run_dir / STEPS, done["step"])
        self._summaries = Summaries(self.run_dir / TENSORBOARD, names)
        self._summaries.resume_after(done["step"])
        self._datasets: list[str] = []  # The datasets of the last line that was printed.
        self.direction, self._resumed = direction, resumed
        self._curves_drawn = time.monotonic()
        self._sums = np.zeros(4)  # Since the last row of steps.csv: steps, their losses, full batches and seconds.
        self._on_report_failed = False

    def steps(
        self, step: int, epoch: int, losses: np.ndarray, batches: float, seconds: float, rates: Callable[[], Row]
    ) -> None:
        """Counts an execution of training steps; writes a row of steps.csv about once a second.

        `step`, the last one over all epochs, and `epoch` count from 1. `losses` are the steps' losses ([count]), whose
        mean is over `batches`, and `seconds` their time. `rates` returns the learning rates, for a row that is due.
        """
        self._sums += len(losses), np.sum(losses, dtype=np.float64), batches, seconds
        self._last_steps = {"step": step, "epoch": epoch}
        if self._sums[-1] >= SECONDS_PER_ROW:
            self._end_row(rates())

    def _end_row(self, rates: Row) -> None:
        count, loss, batches, seconds = self._sums.tolist()
        row = {"loss": loss / batches, "steps_per_second": count / max(seconds, 1e-9), **rates}
        self._sums[:] = 0.0
        append_row(self.run_dir / STEPS, {**self._last_steps, **row})
        self._summaries.add(self._last_steps["step"], {f"steps/{name}": value for name, value in row.items()})

    def epoch(self, row: Row, *, is_best: bool, waited: float = 0.0) -> None:
        """Reports an epoch. `row` has the columns tables.COLUMNS and "<dataset>/<metric>".

        `waited` is the fraction of the training time that was spent waiting for batches.
        """
        self.rows.append(row)
        metrics = {name: value for name, value in row.items() if is_metric(name)}
        self._rates = {name: value for name, value in row.items() if name.split("/")[0] == "learning_rate"}
        speed, epochs = row["examples_per_second"], self.settings.epochs
        ends = [f"{row['seconds']:.1f} s", f"{speed:7,.0f} examples/s"]
        ends += [f"waited {100 * waited:.0f} % for batches"] * (waited > MUCH_WAITING)
        self._print(f"epoch {row['epoch']:>{len(str(epochs))}}/{epochs}", metrics, *ends, is_best=is_best)
        append_row(self.run_dir / METRICS, row, synced=True)
        shown = self.names.scalars(metrics)
        self._summaries.add(row["step"], {"waited": waited, **self._rates, "examples_per_second": speed, **shown})
        if time.monotonic() - self._curves_drawn > SECONDS_BETWEEN_CURVES:
            self.draw_curves()

    def validation(self, step: int, metrics: dict[str, float], *, is_best: bool) -> None:
        """Reports a validation within an epoch: `metrics` as "<dataset>/<metric>"."""
        row = {"step": step, **metrics}
        self.validations.append(row)
        self._print(f"step {step}", metrics, is_best=is_best)
        self._summaries.add(step, self.names.scalars(metrics))
        append_row(self.run_dir / VALIDATIONS, row, synced=True)

    def _print(self, start: str, metrics: Mapping[str, float], *ends: str, is_best: bool) -> None:
        """Prints a line: the monitored metric and losses first, others as far as they fit.

        Each metric as train / validation
        epoch  1/10  loss  1.985 / 0.9777  accuracy 0.2821 / 0.7318  1.8 s      791 examples/s  best
        """
        by_metric: dict[str, dict[str, str]] = {}
        for name, value in metrics.items():
            if name == self.settings.monitor or name not in self.names.arrays:
                values = by_metric.setdefault(self.names.metric(name), {})
                values[self.names.dataset(name)] = f"{digits(value):>6}"
        datasets = list(dict.fromkeys(dataset for values in by_metric.values() for dataset in values))
        if datasets != self._datasets:
            self._datasets = datasets
            console.print(f"Each metric as {' / '.join(datasets)}", style="dim")
        texts = [
            f"{metric} {' / '.join(values.get(dataset, '     -') for dataset in datasets)}"
            for metric, values in by_metric.items()
        ]
        monitored = f"{self.names.metric(self.settings.monitor)} "
        texts.sort(key=lambda text: (not text.startswith(monitored), "loss " not in text))
        while len(texts) > 1 and len("  ".join(texts)) > METRICS_WIDTH:
            texts.pop()
        console.print(Text("  ".join([start, *texts, *ends])).append("  best" * is_best, "bold green"))

    def call_hook(self, on_report: Callable[..., None], row: Row, strategy: tf.distribute.Strategy) -> None:
        """Calls task.on_report, whose summaries go to TensorBoard. Its first exception is printed and ends nothing."""
        # Only the chief calls it. In a replica's context it reads variables without the other processes.
        replica = tf.distribute.ReplicaContext(strategy, replica_id_in_sync_group=0)
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

    def draw_curves(self) -> None:
        """Draws curves.png, if an epoch has ended."""
        if self.rows:
            figure = figure_of_run(
                self.settings, self.names, self.rows, self.validations, self._resumed, self.direction
            )
            write_atomically(self.run_dir / "curves.png", functools.partial(figure.savefig, format="png"))
            self._curves_drawn = time.monotonic()

    def end(self) -> None:
        """Writes the rest, after the last epoch."""
        if self._sums[0]:
            self._end_row(self._rates)
        self.draw_curves()

    def result(self, step: int, metrics: Mapping[str, float], best: float) -> None:
        """Writes the test metrics and the best score of a finished run to TensorBoard."""
        self._summaries.add(step, {**self.names.scalars(metrics), f"best/{self.settings.monitor}": best})


# --- TensorBoard ------------------------------------------------------------------------------------------------------


class Summaries:
    """The summaries in a folder, with one below for each dataset, so that the curves of a metric share a chart."""

    def __init__(self, folder: Path, names: ResultNames) -> None:
        """Writes nothing yet, because the directory must stay empty until the run starts."""
        self._folder, self._names = folder, names
        self._writers: dict[str, tf.summary.SummaryWriter] = {}

    def resume_after(self, step: int) -> None:
        """Lets TensorBoard forget the later steps of earlier starts, so that it shows no step twice."""
        # TensorBoard reads files in the order of their names: this one after the earlier ones, before new ones.
        file = f"events.out.tfevents.{int(time.time())}.-resumed"
        for name in ("", *self._names.datasets):
            if (path := self._folder / name / file).parent.exists():
                start = Event(step=step + 1, session_log=SessionLog(status=SessionLog.START))
                with writing(path), tf.io.TFRecordWriter(str(path)) as writer:
                    for event in (
                        Event(file_version="brain.Event:2"),
                        start,
                        start,
                    ):  # The first start removes nothing.
                        writer.write(event.SerializeToString())

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Writes scalars; "<dataset>/<metric>" goes to the dataset's folder as "<metric>"."""
        folders: dict[str, dict[str, float]] = {}
        for column, value in values.items():
            name = self._names.dataset(column)
            folders.setdefault(name, {})[column.removeprefix(f"{name}/")] = value
        for name, scalars in folders.items():
            with writing(self._folder):
                until_written(functools.partial(self._add, step, name, scalars), self._folder / name)

    def _add(self, step: int, name: str, scalars: dict[str, float]) -> None:
        with self.at(step, name):
            for tag, value in scalars.items():
                tf.summary.scalar(tag, np.float32(value))

    @contextlib.contextmanager
    def at(self, step: int, name: str = "") -> Iterator[None]:
        """Writes the summaries of the code inside at a step, to the folder of a dataset."""
        if name not in self._writers:
            self._writers[name] = tf.summary.create_file_writer(str(self._folder / name))
        try:
            # TensorFlow never frees the tensor that it makes of a number of Python.
            with self._writers[name].as_default(step=np.int64(step)):
                yield
            self._writers[name].flush()
        except tf.errors.OpError:
            del self._writers[name]  # Events behind half an event in a file cannot be read.
            raise


# --- goodput.json -----------------------------------------------------------------------------------------------------

STEPS_THAT_COUNT = ("training", "waiting", "evaluating")
SECONDS_BETWEEN_WRITES = 10.0


class Goodput:
    """How many of a run's seconds went into steps that count, over all its starts, also killed ones.

    The seconds by kind:
        training    training steps that the state contains
        waiting     waiting for the batches of these steps
        evaluating  steps of validation and test
        repeated    all three after the checkpoint from which a run was resumed, because they were done again
        starting    from the import of the engine to the first steps, and the first call of each compiled function
        saving      waiting for a checkpoint
        other       reports, hooks, and waiting for other processes between executions

    The seconds of a killed process are known up to its last write of the file. The time between two starts does not
    count.
    """

    def __init__(self, run_dir: Path, spent: Mapping[str, float], began: float) -> None:
        """Call it when a run has started: from the state of `spent`, at `began` on time.monotonic."""
        self._path, self._began, self._written = run_dir / "goodput.json", began, began
        recorded: dict[str, Any] = read_json(self._path, seconds=dict, starts=int) or {"seconds": {}, "starts": 0}
        before = collections.defaultdict(float, recorded["seconds"])
        self._starts, self._spent_before = recorded["starts"] + 1, sum(spent.values())
        # The state may be newer than the file.
        done = sum(max(0.0, before[kind] - spent.get(kind, 0.0)) for kind in STEPS_THAT_COUNT)
        # The seconds that the state does not contain; starts that were killed may have left no checkpoint.
        self._beside = {kind: max(0.0, before[kind] - spent.get(kind, 0.0)) for kind in ("starting", "saving", "other")}
        self._beside["repeated"] = before["repeated"] + done

    def record(self, spent: Mapping[str, float]) -> dict[str, Any]:
        """Returns {"fraction": the part of all seconds that is `training`, "starts": ..., "seconds": {kind: ...}}."""
        own = time.monotonic() - self._began - (sum(spent.values()) - self._spent_before)
        beside = {**self._beside, "other": self._beside["other"] + max(0.0, own)}
        kinds = (*STEPS_THAT_COUNT, *beside)
        seconds = {kind: round(spent.get(kind, 0.0) + beside.get(kind, 0.0), 3) for kind in kinds}
        fraction = seconds["training"] / max(sum(seconds.values()), 1e-9)
        return {"fraction": round(fraction, 4), "starts": self._starts, "seconds": seconds}

    def write(self, spent: Mapping[str, float], *, is_due: bool = False) -> None:
        """Writes the file if it `is_due` in any case, or was written too long ago."""
        if is_due or time.monotonic() - self._written > SECONDS_BETWEEN_WRITES:
            self._written = time.monotonic()
            with contextlib.suppress(CannotWrite):  # A checkpoint that cannot be written ends the run, with a line.
                write_json(self._path, self.record(spent))


def start_time() -> float:
    """Returns when a start of a run began, on time.monotonic: at the engine's import; a later one in a process, now."""
    began, engine.imported_at = engine.imported_at, None
    return time.monotonic() if began is None else began
