"""The ways a run ends that are not a programming error, each with its exit code."""

import contextlib
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path


class BadInput(Exception):
    """Something the user gave cannot be used. The text is one line: what, its value, the rule, what to do."""

    exit_code = 2


class Diverged(Exception):
    """The loss stopped being a finite number. The text names the step; nothing after it was saved."""

    exit_code = 3


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Ends the program with one line on stderr and the exit code of a BadInput, a Diverged or Ctrl-C inside."""
    try:
        yield
    except (BadInput, Diverged) as ending:
        line = " ".join(str(ending).split())  # A value may hold line breaks.
        print(f"ERROR: {line}", file=sys.stderr, flush=True)
        sys.exit(ending.exit_code)
    except KeyboardInterrupt:
        print("Stopped. The same command goes on from the last checkpoint.", file=sys.stderr, flush=True)
        sys.exit(130)


def where_raised(problem: BaseException) -> str:
    """Returns file and function of the innermost place in train.py or task.py that an exception passed."""
    places = [(Path(frame.filename).name, frame.name) for frame in traceback.extract_tb(problem.__traceback__)]
    # A compiled function tells the user's places in the text of the exception only.
    places += re.findall(r'File "[^"]*?(\w+\.py)", line \d+, in (\w+)', str(problem))
    ours = [f"{file} {function}" for file, function in places if file in ("task.py", "train.py")]
    return ours[-1] if ours else "task.py"


def first_line(problem: BaseException) -> str:
    """Returns an exception's kind and the line of its text that tells most."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    told = next((line for line in lines if re.match(r"\w*(Error|Exception)\b", line)), lines[0] if lines else "")
    return told if told.startswith(type(problem).__name__) else f"{type(problem).__name__}: {told}"
