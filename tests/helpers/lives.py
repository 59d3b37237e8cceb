"""Runs the generated project again and again, ends it each time before its time, and lets the last life end by itself.

    python lives.py --run-dir DIR --log FILE --signals SIGTERM SIGKILL --seed 0 -- <arguments of train.py>

The task is the default one, with a small model that has dropout. The program is imported once and every life is a fork
of that, because to import TensorFlow takes longer than all the rest. The signals end the first lives: at a random time,
in the middle of a save, or in a validation, in turns. Stdout has one JSON line per life, which says how it ended and
how many seconds it took; the log has a line per chunk of steps: how many they were, after which training step, how many
seconds they took, and whether they were the first ones of the life. Each chunk takes --pause seconds longer.
"""

import argparse
import dataclasses
import itertools
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rendering import PROJECT

sys.path.insert(0, str(PROJECT))

import keras
import tensorflow as tf

import engine
import task
import train

LONGEST = 120  # seconds


@dataclasses.dataclass(frozen=True)
class End:
    """How a life is ended: by a signal, `delay` seconds after its first steps or at a call in a place."""

    number: int = 0
    place: str = ""
    delay: float | None = None
    call: float | None = None
    """Which call, counted from 1; 1.5 is after the first one."""


def draw_end(number: int, place: str, draw: random.Random) -> End:
    if place == "anywhere":
        return End(number, place, delay=draw.uniform(0, 0.3))
    # A call in a save, or a chunk of a validation: there are few of them before the next kill is due.
    return End(number, place, call=draw.randrange(2, {"saving": 40, "validation": 8}[place]) / 2)


def ended_at(end: End) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator: the process gets the signal at a call of one of the functions that it is given."""
    calls = itertools.count(1)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            number = next(calls)
            if number == end.call:
                os.kill(os.getpid(), end.number)
            result = function(*arguments, **options)
            if number + 0.5 == end.call:
                os.kill(os.getpid(), end.number)
            return result

        return counted

    return decorate


def create_small_model() -> keras.Model:
    hidden = [keras.layers.Flatten(), keras.layers.Dense(32, activation="gelu"), keras.layers.Dropout(0.3)]
    return keras.Sequential([keras.Input((8, 8, 1)), *hidden, keras.layers.Dense(10)])


def live(arguments: list[str], end: End, log: Path, pause: float) -> int:
    """Runs the program in this process; returns its exit code."""
    engine.imported_at = time.monotonic()  # It was imported long before.
    compile_steps, kill = train.compile_steps, ended_at(end)
    left = [] if end.delay is None else [threading.Timer(end.delay, os.kill, (os.getpid(), end.number))]

    def compile_logged(split: str, step: Callable[..., Any]) -> Callable[..., Any]:
        steps, calls = compile_steps(split, step), itertools.count()

        def logged(stack: Any, first: Any, count: Any) -> Any:
            started = time.monotonic()
            losses = steps(stack, first, count)
            time.sleep(pause)
            seconds, after = time.monotonic() - started, train.run.progress.step
            with log.open("a", encoding="utf-8") as lines:
                lines.write(f"{split} {int(count)} {after} {seconds} {int(next(calls) == 0)}\n")
            while left:
                left.pop().start()
            return losses

        if end.place == split == "validation":
            logged = kill(logged)
        logged.graph = steps.graph
        return logged

    task.create_model, train.compile_steps = create_small_model, compile_logged
    if end.place == "saving":
        Path.rename, Path.replace, shutil.rmtree = map(kill, (Path.rename, Path.replace, shutil.rmtree))
        tf.raw_ops.SaveV2, os.fsync = kill(tf.raw_ops.SaveV2), kill(os.fsync)
    try:
        train.main(arguments)
    except SystemExit as ending:
        return ending.code
    return 0


def lead(arguments: list[str], end: End, log: Path, pause: float) -> int:
    """Runs one life and ends it; returns its exit code, or the signal as a negative number."""
    child = os.fork()
    if not child:
        signal.alarm(LONGEST)
        code = live(arguments, end, log, pause)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def chunks(log: Path) -> int:
    return len(log.read_text(encoding="utf-8").splitlines()) if log.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--signals", nargs="*", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    places = itertools.cycle(["anywhere", "saving", "validation"])
    ends = [draw_end(signal.Signals[name], next(places), draw) for name in options.signals]
    for end in (*ends, End()):
        before, began = chunks(options.log), time.monotonic()
        arguments = [f"--run-dir={options.run_dir}", *options.arguments]
        code = lead(arguments, end, options.log, options.pause)
        life = {"place": end.place, "ended": code, "seconds": time.monotonic() - began}
        print(json.dumps({**life, "chunks": chunks(options.log) - before}), flush=True)


if __name__ == "__main__":
    main()
