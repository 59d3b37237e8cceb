"""The ways a run ends that are not a programming error, each with its exit code."""

import contextlib
import sys
from collections.abc import Iterator


class BadInput(Exception):
    """Something the user gave cannot be used. The text is one line: what, its value, the rule, what to do."""

    exit_code = 2


class Diverged(Exception):
    """The loss stopped being a finite number. The text names the step; nothing after it was saved."""

    exit_code = 3


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Ends the program with one line on stderr and the exit code of a BadInput or Diverged raised inside."""
    try:
        yield
    except (BadInput, Diverged) as ending:
        line = " ".join(str(ending).split())  # A value may hold line breaks.
        print(f"ERROR: {line}", file=sys.stderr, flush=True)
        sys.exit(ending.exit_code)
