"""Two workers, one of which meets an event at a phase of the run: both end in time, with their lines.

These are some cells of the matrix that docs/failures.md shows; helpers/matrix.py runs all of them.
"""

import re
from pathlib import Path

import as_root
import pytest
from clusters import COUNTED, LOST
from matrix import Cell, trial, undisturbed

STOPPED = 42
GONE = "ERROR: .*worker {0.victim} \\({address}\\) (is gone|does not answer)"
FULL = "ERROR: .*No space left.*free disk space"
RESUMED = Cell("mid-epoch", "SIGTERM", 1)  # The same command afterwards ends with the weights of an undisturbed run.
# One cell for each way in which a worker learns of the event: how the victim ends, and how the other one does. A frozen
# process does not end until the test continues it, so the end of the other one is counted.
CELLS = {
    Cell("TensorFlow's start", "SIGTERM", 1): (STOPPED, "stopped by SIGTERM; nothing was lost", LOST, GONE),
    RESUMED: (
        *(STOPPED, "stopped by SIGTERM, the state is in "),
        *(STOPPED, "stopped by a signal to worker 1, the state is in "),
    ),
    Cell("mid-epoch", "SIGSTOP", 0): (LOST, "ERROR: ", COUNTED, GONE),
    # One full disk is counted once, although both may name it.
    Cell("checkpoint", "full disk", 0): (1, FULL, LOST, f"{FULL}|{GONE}"),
    Cell("test", "exception", 1): (2, r"ERROR: faults\.py:\d+ \w+: \w+: .*planted", LOST, GONE),
}


@pytest.mark.long
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_both_end_in_time_with_their_lines(cell: Cell, tmp_path: Path) -> None:
    if cell.event == "full disk" and as_root.prefix() is None:
        pytest.skip("a small disk needs root")
    code, line, code_of_other, line_of_other = CELLS[cell]
    with trial(cell, tmp_path / "trial") as disturbed:
        victim, other = disturbed.run()
        log = (disturbed.logs / f"worker-{1 - cell.victim}.log").read_text(encoding="utf-8")
        assert (victim.code, other.code) == (code, code_of_other), log
        assert re.match(line, victim.line), victim.line
        assert re.match(line_of_other.format(cell, address=disturbed.addresses[cell.victim]), other.line), other.line
        assert "Traceback" not in log
        if cell == RESUMED:
            assert disturbed.finish() == undisturbed(tmp_path / "undisturbed")
