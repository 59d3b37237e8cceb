"""Two workers, one of which meets an event at a phase of the run: both end in time, with their lines.

These are some cells of the matrix; with ALL_CELLS=1 in the environment they are all. docs/failures.md shows it.
"""

import os
import re
import signal
from pathlib import Path

import as_root
import pytest
from clusters import COUNTED, LOST
from matrix import POSSIBLE, Cell, End, trial, undisturbed

BEFORE_THE_RUN = ("rendezvous", "before TensorFlow's start", "TensorFlow's start")
# One cell for each way in which a worker learns of the event.
CHOSEN = [
    Cell("before TensorFlow's start", "SIGKILL", 0),
    Cell("TensorFlow's start", "SIGTERM", 1),
    Cell("TensorFlow's start", "SIGSTOP", 1),
    Cell("mid-epoch", "SIGTERM", 1),
    Cell("mid-epoch", "exception", 1),
    Cell("checkpoint", "SIGKILL", 0),
    Cell("checkpoint", "full disk", 0),
    Cell("test", "exception", 1),
    Cell("end", "SIGKILL", 0),
]
# The same command afterwards ends with the weights of an undisturbed run.
RESUMED = [Cell("mid-epoch", "SIGTERM", 1), Cell("checkpoint", "SIGKILL", 0)]


def check_killed(cell: Cell, victim: End, other: End, address: str) -> None:
    assert victim.code == -signal.SIGKILL
    check_other(cell, other, address)


def check_other(cell: Cell, other: End, address: str) -> None:
    """The one that is left names the lost one, or has nothing left to do."""
    if cell.phase == "end":
        assert other.code == 0
    else:
        # A process that is missing from the start, or frozen, does not end. So this one's end is counted.
        silent = cell.phase == "rendezvous" or "is gone" not in other.line
        assert other.code == (COUNTED if silent else LOST)
        assert re.match(
            rf"ERROR: .*worker {cell.victim} \({address}\) (is gone|does not answer|did not join)", other.line
        )


def check_stopped(cell: Cell, victim: End, other: End, address: str) -> None:
    if cell.phase == "end":
        assert (victim.code, other.code) == (0, 0)
    elif cell.phase in BEFORE_THE_RUN:
        assert victim.code == 42
        assert victim.line.startswith("stopped by SIGTERM; nothing was lost")
        check_other(cell, other, address)
    else:
        # After the last checkpoint there is nothing left to save.
        saved = "; to continue" if cell.phase in ("checkpoint", "test") else ", the state is in "
        assert (victim.code, other.code) == (42, 42)
        assert victim.line.startswith(f"stopped by SIGTERM{saved}")
        assert other.line.startswith(f"stopped by a signal to worker {cell.victim}{saved}")


def check_frozen(cell: Cell, victim: End, other: End, address: str) -> None:
    check_other(cell, other, address)
    if cell.phase == "end":
        assert victim.code == 0
    else:  # It was continued when the other one had ended.
        assert victim.code in (LOST, COUNTED)
        assert victim.line.startswith("ERROR: ")


def check_exception(cell: Cell, victim: End, other: End, address: str) -> None:
    assert victim.code == 2
    assert re.match(r"ERROR: faults\.py:\d+ \w+: \w+: .*planted", victim.line)
    check_other(cell, other, address)


def check_full(cell: Cell, victim: End, other: End, address: str) -> None:
    if cell.phase == "end":
        assert (victim.code, other.code) == (0, 0)
    else:
        assert victim.code == 1
        assert "No space left" in victim.line
        assert "free disk space" in victim.line
        if other.line == victim.line:
            assert other.code == LOST  # Otherwise one full disk would count once for each worker.
        else:
            check_other(cell, other, address)


CHECKS = {
    "SIGKILL": check_killed,
    "SIGTERM": check_stopped,
    "SIGSTOP": check_frozen,
    "exception": check_exception,
    "full disk": check_full,
}


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "run")


@pytest.mark.long
@pytest.mark.parametrize("cell", POSSIBLE if os.environ.get("ALL_CELLS") else CHOSEN, ids=str)
def test_both_end_in_time_with_their_lines(cell: Cell, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if cell.event == "full disk" and as_root.prefix() is None:
        pytest.skip("a small disk needs root")
    with trial(cell, tmp_path / "trial") as disturbed:
        victim, other = disturbed.run()
        log = (disturbed.logs / f"worker-{1 - cell.victim}.log").read_text(encoding="utf-8")
        CHECKS[cell.event](cell, victim, other, disturbed.addresses[cell.victim])
        assert "Traceback" not in log
        if cell in RESUMED or os.environ.get("ALL_CELLS"):
            assert disturbed.finish() == request.getfixturevalue("weights")
