"""Makes the README's pictures, runs.svg, curves.png and check.svg, from a rendered project: make pictures.

A picture has the lines that stand there at the end: live lines are gone by then.
"""

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Iterable
from pathlib import Path

import rich.console
import rich.text
from cookiecutter.main import cookiecutter

TEMPLATE = Path(__file__).parents[1]
WIDTH = 106
RUNS = ("train.py --epochs 5", "train.py --epochs 5 --simulated-devices 2 --run-dir runs/two")
CHECK = "train.py --check"
# A usual mistake: each replica's loss is the mean over its own part of the batch.
SOUND = "tf.nn.compute_average_loss("
FAULTY = "(lambda losses, sample_weight, global_batch_size: tf.reduce_mean(losses * sample_weight))("
# rich's own would fetch a font from a host.
SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
    font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main() -> None:
    """Renders a project, runs its commands and writes both pictures."""
    build = TEMPLATE / "build" / "pictures"
    shutil.rmtree(build, ignore_errors=True)
    project = Path(cookiecutter(str(TEMPLATE), no_input=True, output_dir=str(build), default_config=True))
    lines = []
    for command in RUNS:
        shown = [
            line for line in screen(output_of(project, command)) if re.match(r"(\x1b\[[\d;]*m)*(Each|epoch)", line)
        ]
        lines += [f"$ python {command}", *shown, ""]
    draw("runs", lines[:-1])
    shutil.copyfile(project / "runs" / "default" / "curves.png", TEMPLATE / "docs" / "curves.png")
    task = project / "task.py"
    code = task.read_text(encoding="utf-8")
    if code.count(SOUND) != 1:
        raise SystemExit(f"{task} has another loss than this program plants a fault in")
    task.write_text(code.replace(SOUND, FAULTY), encoding="utf-8")
    draw("check", [f"$ python {CHECK}", *screen(output_of(project, CHECK))])


def draw(name: str, lines: Iterable[str]) -> None:
    console = rich.console.Console(record=True, width=WIDTH, file=open(os.devnull, "w"))  # noqa: SIM115
    for line in lines:
        console.print(rich.text.Text.from_ansi(line))
    picture = console.export_svg(title="my_training", code_format=SVG, unique_id=name)
    (TEMPLATE / "docs" / f"{name}.svg").write_text(picture, encoding="utf-8")


def output_of(project: Path, command: str) -> str:
    """Returns all that a command writes to a terminal of WIDTH columns. --check may find faults."""
    terminal, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 50, WIDTH, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    with subprocess.Popen(
        [sys.executable, *command.split()], cwd=project, env=environment, stdin=inner, stdout=inner, stderr=inner
    ) as process:
        os.close(inner)
        written = b""
        try:
            while data := os.read(terminal, 2**16):
                written += data
        except OSError:  # Linux says so that the program has ended.
            pass
    if process.returncode != (2 if command == CHECK else 0):
        raise SystemExit(f"python {command} ended with {process.returncode}:\n{written.decode()}")
    return written.decode()


def screen(written: str) -> list[str]:
    """Returns the lines that stand in a terminal in the end, with their colors."""
    lines, row = [""], 0
    for part in re.split(r"(\r\n|\n|\r|\x1b\[2K|\x1b\[\d*A|\x1b\[\?25[lh])", written):
        if part in ("\n", "\r\n"):
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif up := re.fullmatch(r"\x1b\[(\d*)A", part):
            row -= int(up[1] or 1)
        elif part != "\r" and not part.startswith("\x1b[?25"):
            lines[row] += part
    while lines and not lines[-1]:
        lines.pop()
    return lines


if __name__ == "__main__":
    main()
