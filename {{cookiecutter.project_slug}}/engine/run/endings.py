"""How the epochs of a run end before their time: what is saved then, and which line says how to continue."""

import contextlib
from collections.abc import Iterator

from engine.cluster.peers import peers_named
from engine.errors import BadInput, Diverged, InterruptedStep, Stopped, Unavailable, exit_codes
from engine.messages import user_errors_named
from engine.run.run import Run
from engine.run.signals import signals


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
    started = run.progress.position()
    try:
        with run.steps_named():
            run.stop_if_asked()  # Before the first steps are compiled.
            yield
            from_chief(checkpoints.writer.wait)
    except Stopped as problem:
        saved = run.save()
        from_chief(checkpoints.writer.wait)
        raise Stopped(f"{problem}, the state is in {saved}") from problem
    except Diverged as problem:
        from_chief(checkpoints.writer.wait)
        advice = "Nothing was saved. Start over with --fresh"
        if paths := checkpoints.paths():
            advice = f"The last good checkpoint is {paths[-1]}; nothing later was saved. "
            advice += f"Start a new --run-dir with --init-from {paths[-1]}"
        remedy = "and a smaller --learning-rate or --global-clipnorm, or find the cause with --check"
        raise Diverged(f"{problem}. {advice} {remedy}") from problem
    except BadInput as problem:
        # A step that failed may be half done, and unrecorded steps cannot be saved. Other workers may not know of
        # the failure, and a save would wait for them.
        is_partial = isinstance(problem, InterruptedStep) or any(one_pass.unrecorded for one_pass in run.passes)
        may_save = run.workers.count == 1 and not is_partial
        if may_save and run.progress.position() != started:
            run.save()
        checkpoints.writer.wait()
        paths = checkpoints.paths()
        kept = f"the same command, without --fresh, resumes from {paths[-1]}" if paths else "nothing was saved yet"
        stopped = may_save and isinstance(problem, Unavailable) and signals.signal
        raise (Stopped if stopped else type(problem))(f"{problem}; {kept}") from problem
    except BaseException:
        checkpoints.writer.wait()  # The other workers may not know of it.
        raise
