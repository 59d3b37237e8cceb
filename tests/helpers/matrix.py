"""Two workers, one of which meets an event at a phase of the run: how both end, and when.

    python tests/helpers/matrix.py --side-by-side 3 --folder build/matrix

runs all cells, and prints the table of docs/failures.md.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import as_root
import clusters
from clusters import Worker

PHASES = (
    *("rendezvous", "before TensorFlow's start", "TensorFlow's start", "tracing", "first step", "mid-epoch"),
    *("validation", "checkpoint", "test", "end"),
)
EVENTS = ("SIGKILL", "SIGTERM", "SIGSTOP", "exception", "full disk")
FLAGS = ("--epochs=2", "--global-batch-size=16", "--steps-per-execution=4", "--cluster-timeout=10")
LONGEST = 180.0  # Seconds from the event to the end of both.
NO_HOOK = ("rendezvous", "before TensorFlow's start", "TensorFlow's start", "checkpoint", "end")
DISK = "4m"
Entry = tuple[str, str]  # The exit codes of the victim and the other worker; the seconds after which the other ended.


@dataclasses.dataclass(frozen=True)
class Cell:
    """A phase, an event, and the worker that meets it; worker 0 is the chief."""

    phase: str
    event: str
    victim: int

    def __str__(self) -> str:
        return f"{self.event} to the {('chief', 'worker')[self.victim]} in {self.phase}"

    def why_impossible(self) -> str:
        """Returns why a cell cannot exist; "" if it can."""
        if self.event == "exception" and self.phase in NO_HOOK:
            return "no hook runs"
        if self.event == "full disk" and self.victim:
            return "it writes nothing"
        if self.event == "full disk" and self.phase == "TensorFlow's start":
            return "nothing is written"
        return ""


@dataclasses.dataclass
class End:
    """How a worker ended: None for what did not come."""

    code: int | None
    seconds: float | None  # From the event on.
    line: str


class Trial:
    """A cell in a folder: a project, and the run that the event disturbs."""

    def __init__(self, cell: Cell, folder: Path) -> None:
        self.cell, self.disk, self._marker = cell, folder / "disk", folder / "marker"
        self.run_dir = self.disk / "run"
        self.disk.mkdir(parents=True)
        places = f"Path({str(self._marker)!r}), Path({str(self.disk)!r})"
        planted = f"faults.plant(globals(), {cell.phase!r}, {cell.event!r}, {cell.victim}, {places})"
        self.project = clusters.project_with(folder, f"\n\nimport faults\n\n{planted}\n")
        shutil.copy(Path(__file__).with_name("faults.py"), self.project)
        self.logs = folder / "logs"

    def run(self) -> tuple[End, End]:
        """Returns how the victim and the other one ended. What did not end is killed."""
        flags = (*FLAGS, f"--run-dir={self.run_dir}")
        with clusters.workers(self.project, self.logs, 2, *flags) as both:
            self.addresses = [each.address for each in both]
            victim, other = both[self.cell.victim], both[1 - self.cell.victim]
            clusters.until(lambda: self._marker.exists() and self._marker.stat().st_size, seconds=300)
            event = float(self._marker.read_text())
            ends: dict[Worker, End] = {}
            resumed = self.cell.event != "SIGSTOP"
            deadline = event + LONGEST
            while len(ends) < 2 and time.time() < deadline:
                for each in both:
                    if each not in ends and (code := each.process.poll()) is not None:
                        ends[each] = End(code, round(time.time() - event, 1), each.last_line())
                if other in ends and not resumed:
                    victim.process.send_signal(signal.SIGCONT)
                    resumed, deadline = True, time.time() + LONGEST
                time.sleep(0.05)
            return tuple(ends.get(each) or End(None, None, each.last_line()) for each in (victim, other))

    def finish(self) -> str:
        """Runs the same command to its end, on a disk with room; returns the weights' SHA-256."""
        (self.disk / "filler").unlink(missing_ok=True)
        clusters.train(self.project, self.run_dir, 2, *FLAGS)
        return json.loads((self.run_dir / "result.json").read_text())["weights_sha256"]


@contextlib.contextmanager
def trial(cell: Cell, folder: Path) -> Iterator[Trial]:
    """A trial whose run directory is on a small disk of its own if that is to be full; that needs root."""
    made = Trial(cell, folder)
    if cell.event != "full disk":
        yield made
        return
    as_root.run("mount", "-t", "tmpfs", "-o", f"size={DISK},mode=777", "none", str(made.disk))
    try:
        yield made
    finally:
        as_root.run("umount", "--lazy", str(made.disk))


def undisturbed(folder: Path) -> str:
    """Returns the weights' SHA-256 of a run in which nothing happens."""
    return Trial(Cell("never", "SIGKILL", 0), folder).finish()


def entry(cell: Cell, folder: Path, expected: str) -> Entry:
    """Runs a cell; returns what the matrix shows: the victim's exit code, the other's, and when the other ended.

    With `expected`, the weights of an undisturbed run, the same command is started again afterwards.
    """
    with trial(cell, folder) as run:
        victim, other = run.run()
        assert not expected or run.finish() == expected, cell
    codes = [other.code] if victim.code == -signal.SIGKILL else [victim.code, other.code]
    text = ", ".join("runs on" if code is None else str(code) for code in codes)
    return text, "never" if other.seconds is None else f"{other.seconds:.0f}"


def shown(entries: dict[Cell, Entry], phase: str, event: str) -> str:
    """Returns "2, 43 (0, 6)": the codes, and the seconds if the chief and if the other worker meets the event."""
    seconds_by_codes: dict[str, list[str]] = {}
    for cell in (Cell(phase, event, 0), Cell(phase, event, 1)):
        if not cell.why_impossible():
            codes, seconds = entries.get(cell, ("not run", "-"))
            seconds_by_codes.setdefault(codes, []).append(seconds)
    return " / ".join(f"{codes} ({', '.join(seconds)})" for codes, seconds in seconds_by_codes.items()) or "-"


def table(entries: dict[Cell, Entry]) -> str:
    lines = [f"| phase | {' | '.join(EVENTS)} |", "|---|" + "---|" * len(EVENTS)]
    for phase in PHASES:
        lines.append(f"| {phase} | {' | '.join(shown(entries, phase, event) for event in EVENTS)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--side-by-side", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="start the same command afterwards, and compare")
    parser.add_argument("--only", nargs="*", default=[""], help="cells with one of these texts in their name")
    parser.add_argument("--folder", type=Path, required=True, help="gets the logs")
    options = parser.parse_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True)
    expected = undisturbed(folder / "undisturbed") if options.again else ""
    cells = [Cell(*each) for each in itertools.product(PHASES, EVENTS, (0, 1))]
    chosen = [each for each in cells if not each.why_impossible() and any(text in str(each) for text in options.only)]
    with concurrent.futures.ThreadPoolExecutor(options.side_by_side) as threads:
        entries = threads.map(lambda cell: entry(cell, folder / str(cell).replace(" ", "_"), expected), chosen)
        print(table(dict(zip(chosen, entries, strict=True))))


if __name__ == "__main__":
    main()
