"""Saves a run whose training ends early: by a signal, bad input, or a loss that is not finite."""

import contextlib
from collections.abc import Iterator

from engine.errors import BadInput, Diverged, InterruptedStep, Stopped
from engine.run.run import Run


@contextlib.contextmanager
def saving_on_exit(run: Run) -> Iterator[None]:
    """Saves the state if a signal or bad input ends the epochs inside; returns when all files are written.

    The messages of BadInput, Diverged and Stopped get the checkpoint to resume from.
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
        advice = "Nothing was saved. Start --fresh"
        if paths := checkpoints.paths():
            advice = f"The last good checkpoint is {paths[-1]}; nothing later was saved. "
            advice += f"Start a new --run-dir with --init-from {paths[-1]}"
        remedy = "and a smaller --learning-rate or --global-clipnorm, or find the cause with --check"
        raise Diverged(f"{problem}. {advice} {remedy}") from problem
    except BadInput as problem:
        # A step that failed may be half done, and uncounted steps cannot be saved. Other workers may not know of the
        # failure, and a save would wait for them.
        is_complete = run.is_counted and not isinstance(problem, InterruptedStep)
        if is_complete and run.workers.count == 1 and run.progress.position() != started:
            run.save()
        checkpoints.writer.wait()
        paths = checkpoints.paths()
        kept = f"the same command, without --fresh, resumes from {paths[-1]}" if paths else "nothing was saved yet"
        raise type(problem)(f"{problem}; {kept}") from problem
    except BaseException:
        checkpoints.writer.wait()  # The other workers may not know of it.
        raise
