"""Saves a run whose training ends early: by a signal, bad input, or a loss that is not finite."""

import contextlib
from collections.abc import Iterator

from engine.errors import BadInput, Diverged, InterruptedStep, Stopped
from engine.run.run import Run


@contextlib.contextmanager
def saving_on_exit(run: Run) -> Iterator[None]:
    """Saves the state if a signal or bad input stops the epochs inside; returns when all files are written.

    Raises:
        BadInput, Diverged, Stopped: the epochs did. The message also names the checkpoint to resume from.
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
        paths = checkpoints.paths()
        last, start = "Nothing was saved.", "--fresh"
        if paths:
            last = f"The last good checkpoint is {paths[-1]}; nothing later was saved."
            start = f"a new --run-dir with --init-from {paths[-1]}"
        raise Diverged(
            f"{problem}. {last} Start {start} and a smaller --learning-rate or --global-clipnorm, or find the cause "
            "with --check"
        ) from problem
    except BadInput as problem:
        # A step that failed may be half done, and steps that are not counted cannot be saved. Other workers may not
        # know of the failure, so nothing is asked of them.
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
