"""goodput.json: how many of a run's seconds went into steps that count, over all its starts, also killed ones.

The seconds by kind:
    training    training steps that the state contains
    waiting     waiting for the batches of these steps
    evaluating  steps of validation and test
    repeated    all three after the checkpoint from which a run was resumed, because they were done again
    starting    from the import of the engine to the first steps, and the first call of each compiled function
    saving      waiting for a checkpoint
    other       reports, hooks, and waiting for other processes between executions

The seconds of a killed process are known up to its last write of the file. The time between two starts does not count.
"""

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import engine
from engine.errors import BadInput, CannotWrite
from engine.files import read_json, write_json

GOODPUT = "goodput.json"
STEPS = ("training", "waiting", "evaluating")
STARTS = ("starting", "saving")
# An execution is followed by a write once this fraction of the time since the start has passed, in these limits.
FRACTION_BETWEEN_WRITES = 0.01
SECONDS_BETWEEN_WRITES = (0.25, 60.0)


class Goodput:
    """The seconds of all starts of a run. `spent` is `Progress.spent`: those that led to the present state."""

    def __init__(self, run_dir: Path, spent: Mapping[str, float], began: float) -> None:
        """Call it when a run has started, from the state of `spent`. `began` is when, on time.monotonic."""
        self._path, self._began, self._written = run_dir / GOODPUT, began, began
        before, self._starts = _read(self._path)
        self._before = sum(spent.values())
        earlier = sum(before.get(kind, 0.0) for kind in (*STEPS, "repeated"))
        self._repeated = max(0.0, earlier - sum(spent.get(kind, 0.0) for kind in STEPS))
        # The seconds of starts that have left no checkpoint.
        self._lost = {kind: max(0.0, before.get(kind, 0.0) - spent.get(kind, 0.0)) for kind in STARTS}
        self._other = before.get("other", 0.0)

    def record(self, spent: Mapping[str, float]) -> dict[str, Any]:
        """Returns {"fraction": the part of all seconds that is `training`, "starts": ..., "seconds": {kind: ...}}."""
        own = time.monotonic() - self._began - (sum(spent.values()) - self._before)
        seconds = {kind: spent.get(kind, 0.0) + self._lost.get(kind, 0.0) for kind in (*STEPS, *STARTS)}
        seconds |= {"repeated": self._repeated, "other": self._other + max(0.0, own)}
        fraction = seconds["training"] / max(sum(seconds.values()), 1e-9)
        rounded = {kind: round(value, 3) for kind, value in seconds.items()}
        return {"fraction": round(fraction, 4), "starts": self._starts, "seconds": rounded}

    def write(self, spent: Mapping[str, float], *, is_due: bool = False) -> None:
        """Writes the file if it `is_due` in any case, or was written too long ago."""
        now, (least, most) = time.monotonic(), SECONDS_BETWEEN_WRITES
        if is_due or now - self._written > min(most, max(least, FRACTION_BETWEEN_WRITES * (now - self._began))):
            self._written = now
            with contextlib.suppress(CannotWrite):  # A checkpoint that cannot be written ends the run, with a line.
                write_json(self._path, self.record(spent))


def start_time() -> float:
    """Returns when a start of a run began, on time.monotonic: at the engine's import; a later one in a process, now."""
    began, engine.imported_at = engine.imported_at, None
    return time.monotonic() if began is None else began


def _read(path: Path) -> tuple[dict[str, float], int]:
    """Returns the seconds of earlier starts, and the number of this one; a damaged file counts as none."""
    try:
        recorded = read_json(path) or {}
        return {kind: float(value) for kind, value in recorded.get("seconds", {}).items()}, int(recorded["starts"]) + 1
    except (BadInput, KeyError, TypeError, ValueError, AttributeError):
        return {}, 1
