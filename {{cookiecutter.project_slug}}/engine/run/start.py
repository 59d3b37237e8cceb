"""How a run starts, with which files, and how it ends: what is saved then, and which line says how to continue."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import tensorflow as tf

from engine.cluster.launcher import START_ID
from engine.cluster.peers import peers_named
from engine.cluster.workers import Workers
from engine.console import console, print_result
from engine.errors import (
    BadInput,
    Damaged,
    Diverged,
    InterruptedStep,
    Stopped,
    Unavailable,
    exit_codes,
    user_errors_named,
)
from engine.files import read_json, until_written, write_json, writing
from engine.report.report import Goodput, Report
from engine.run.agreement import check_objects, same_data
from engine.run.directory import RESULT, Directory
from engine.run.progress import Progress
from engine.run.resume import created_rates, resume
from engine.run.state import weights_sha256
from engine.run.summary import describe_run, describe_start, print_summary
from engine.run.training import Run
from engine.settings import CONFIG, Settings
from engine.signals import signals
from engine.tracing import unrepeatable


class RunDirectory(Directory):
    """The directory of a run that trains. As a context manager it also listens to signals."""

    def __init__(self, settings: Settings, strategy: tf.distribute.Strategy) -> None:
        """Changes nothing; the directory need not exist."""
        super().__init__(settings)
        self.workers = Workers(strategy)
        self._start = ""  # "resumed from ...", or which weights the run starts with.
        self._listening = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._listening.enter_context(signals.listening())
        return self

    def __exit__(self, *problem: object) -> None:
        with self._listening:
            super().__exit__(*problem)
            if not any(problem) and self.settings.export:  # A signal is heeded now: the export does not listen.
                signals.check(self.workers.names_where)

    def result(self) -> dict[str, Any] | None:
        """Locks the directory; returns the result of the run in it if nothing is left to do.

        Raises BadInput if the directory cannot be used, or contains a run with other settings.
        """

        def look() -> dict[str, Any] | None:
            if not self.is_fresh:
                self.check_same_run()
            self.lock()
            return None if self.is_fresh else read_json(self.path / RESULT)

        result, settings = self.workers.from_chief(look) or {}, self.settings
        epochs, without_improvement = result.get("epochs"), result.get("epochs_without_improvement")
        is_complete = result.keys() >= {"step", "seconds", "weights_sha256"}
        if not is_complete or not isinstance(epochs, int) or not isinstance(without_improvement, int):
            return None  # There is no result yet; or it was edited by hand, and is made again.
        if epochs >= settings.epochs:
            more = "--epochs"
        elif settings.patience is not None and without_improvement >= settings.patience:
            more = "--patience"
        else:
            return None
        console.print(f"Finished already after {epochs} epochs (more {more} would continue it; --fresh starts over)")
        print_result(result, settings)
        return result

    def restore(self, run: Run) -> None:
        """Restores the newest checkpoint, if there is one; otherwise the run starts with the weights as they are.

        Raises BadInput if the run cannot be resumed, or the processes do not fit together. Writes nothing.
        """
        is_fresh = run.workers.from_chief(lambda: self.is_fresh)
        resumed = None if is_fresh else resume(run)
        if not resumed:  # Examples that cannot be read are rejected before anything is written.
            data = same_data(run.workers, run.batches, run.objects.data_files)
            new = Progress(learning_rates=created_rates(run), data=data)
        progress, self._start = resumed or (new, run.objects.source)
        check_objects(run.workers, run.checkpoints.state, run.objects)
        cause = "something in task.create_model or create_optimizer"
        run.checkpoints.state.check_workers({}, cause, is_start=resumed is None)
        run.start(progress)

    @contextlib.contextmanager
    def recording(self, run: Run) -> Iterator[None]:
        """Writes the first files and prints the run summary; saves the state if the code inside ends early.

        Raises what `saving_on_exit` raises.
        """
        _warn(run)
        run.workers.from_chief(lambda: self._write_first_files(run))
        run.progress.spend("starting", time.monotonic() - run.began)
        run.write_goodput(is_due=True)
        print_summary(run, self._start)
        with saving_on_exit(run):
            yield

    def _write_first_files(self, run: Run) -> None:
        progress, direction = run.progress, run.objects.monitor_direction
        earlier = {} if self.is_fresh else self.config
        self.open()
        for checkpoints in (run.checkpoints, run.best):
            checkpoints.clear()
        # Weights that were saved after the checkpoint will be saved again.
        run.best.forget(progress.step, but=progress.best_step)
        starts = [*earlier.get("starts", []), describe_start(progress.step, self.settings)][-100:]  # There may be many.
        config = {
            **describe_run(run, earlier),
            "start_id": earlier.get("start_id", os.environ.get(START_ID)),
            "monitor_direction": direction,
            "starts": starts,
        }
        # First of all, because a directory with other files and without it counts as foreign.
        write_json(self.path / CONFIG, config)
        resumed = [start["step"] for start in starts if 0 < start["step"] <= progress.step]
        done = {"epochs": progress.epoch, "validation": progress.validated_step or 0, "step": progress.step}
        run.report = Report(self.settings, run.objects.names, direction, done, resumed)
        run.goodput = Goodput(self.path, progress.spent, run.began)
        with writing(self.path / RESULT):
            until_written(lambda: (self.path / RESULT).unlink(missing_ok=True), self.path / RESULT)

    def finish(self, run: Run, test: Callable[[], dict[str, float]]) -> dict[str, Any]:
        """Tests the best weights; writes and returns the contents of result.json."""
        settings, progress, best = self.settings, run.progress, run.best
        without_improvement = progress.epochs_without_improvement()
        if run.is_out_of_patience and progress.best_epoch:
            console.print(f"Stopped by --patience: {settings.monitor} was best in epoch {progress.best_epoch}.")
        run.executions.report_missing_profile()
        fingerprint = weights_sha256(run.objects.weights)
        if progress.best_step is None:
            raise Diverged(f"--monitor {settings.monitor} was never a number: correct it, or call run.save_if_best")
        try:
            best.restore(best.path(progress.best_step))
        except Damaged as problem:
            raise BadInput(f"{problem}: the same command, without --fresh, resumes from an older one") from problem
        with run.steps_named():
            metrics = test()
        run.write_goodput(is_due=True)
        result: dict[str, Any] = {
            **(metrics or {"test": None}),
            "epochs": progress.epoch,
            "step": progress.step,
            "best_epoch": progress.best_epoch,
            f"best_{settings.monitor}": progress.best_score,
            "epochs_without_improvement": without_improvement,
            "seconds": progress.seconds,
            "goodput": run.workers.from_chief(lambda: run.goodput and run.goodput.record(progress.spent)),
            "weights_sha256": fingerprint,
        }
        run.report_on_chief(lambda report: report.result(progress.step, metrics, progress.best_score or 0.0))
        run.workers.from_chief(lambda: write_json(self.path / RESULT, result))
        print_result(result, settings)
        return result


def _warn(run: Run) -> None:
    """Prints what of the hooks a resumed run may not repeat, which random numbers are correlated, and other faults."""
    hooks = [("prepare_example", dataset.traced) for dataset in run.batches.values()]
    hooks.append(("train_step", run.traced.get("train")))
    warnings = []
    for hook, traced in hooks:
        if traced:  # It is None with --eager.
            draws, calls = unrepeatable(traced, hook)
            warnings += [f"task.{hook}: {text}" for text in (*draws, *calls, *traced.shared_seeds)]
            if hook == "train_step" and "summary" in run.objects.names_in_steps and not traced.writes_summaries:
                warnings.append("task.train_step: tf.summary writes nothing in a step; write summaries in on_report")
    for text in dict.fromkeys(warnings):
        console.print(text)


# --- The end ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def documented_exits() -> Iterator[None]:
    """Turns an exception inside into a line and an exit code of engine/errors.py, unless it is a bug of the engine."""
    with exit_codes(), user_errors_named(), peers_named():
        yield


@contextlib.contextmanager
def saving_on_exit(run: Run) -> Iterator[None]:
    """Saves the state if a signal or bad input ends the epochs inside; returns when all files are written.

    The messages of BadInput, Diverged and Stopped name the newest checkpoint, if there is one.
    """
    from_chief, checkpoints = run.workers.from_chief, run.checkpoints
    try:
        with run.steps_named():
            run.stop_if_asked()  # Before the first steps are compiled.
            yield
            from_chief(checkpoints.writer.wait)
    except Stopped as problem:
        if not run.prepares_epoch:
            run.save()
        from_chief(checkpoints.writer.wait)
        paths = from_chief(checkpoints.paths)
        raise Stopped(f"{problem}, {f'the state is in {paths[-1]}' if paths else 'nothing was saved yet'}") from problem
    except Diverged as problem:
        from_chief(checkpoints.writer.wait)
        advice = "Nothing was saved. Start over with --fresh"
        if paths := checkpoints.paths():
            advice = (
                f"The last good checkpoint is {paths[-1]}; nothing later was saved. Start a new --run-dir with "
                f"--init-from {paths[-1]}"
            )
        remedy = "a smaller --learning-rate or --global-clipnorm, or find the cause with --check"
        if run.settings.precision == "mixed_float16":
            remedy = f"--precision mixed_bfloat16, because mixed_float16 has no numbers above 65,504; or with {remedy}"
        raise Diverged(f"{problem}. {advice} and {remedy}") from problem
    except BadInput as problem:
        # A step that failed may be half done, and unrecorded steps cannot be saved. Other workers may not know of
        # the failure, and a save would wait for them.
        is_partial = isinstance(problem, InterruptedStep) or any(one_pass.unrecorded for one_pass in run.passes)
        may_save = run.workers.count == 1 and not is_partial and not run.prepares_epoch
        if may_save and not run.is_saved:
            run.save()
        checkpoints.writer.wait()
        paths = checkpoints.paths()
        kept = f"the same command, without --fresh, resumes from {paths[-1]}" if paths else "nothing was saved yet"
        stopped = may_save and isinstance(problem, Unavailable) and signals.signal
        raise (Stopped if stopped else type(problem))(f"{problem}; {kept}") from problem
    except BaseException:
        checkpoints.writer.wait()  # The other workers may not know of it.
        raise
    finally:
        run.write_goodput(is_due=True)
