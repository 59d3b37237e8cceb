"""Connects deploy/ray_train.py to Ray: the exit codes of workers, their metrics, and the nodes that are missing."""

import contextlib
import logging
import os
import sys
import threading
from typing import Any

import ray
from ray import train as ray_train

from engine.errors import BadInput, Diverged, ProgramExit, Stopped, first_line

DEFAULTS = {
    # Ray gives its workers a low priority (nice 15), with which training is slow beside another busy program.
    "RAY_worker_niceness": "0",
    # Each check takes one report of a worker, and the training waits until the one before it is taken.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    # After a loss Ray may ask for as many workers as before, and for fewer only when they did not start in this time.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",
    # Otherwise print() in a hook becomes a line of a log at the level INFO, which is not shown.
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
}


class Restarts(ray_train.UserCallback):
    """Ends the training after a final exit code of train.py. Ray restarts after all others, and counts failures."""

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Any]) -> None:
        """Prints how workers ended, in one line; `worker_exceptions` has a SystemExit for an exit code.

        Raises ControllerError, after which Ray does not restart, and PreemptionError, which it does not count.
        """
        codes = {getattr(problem, "code", None) for problem in worker_exceptions.values()}
        ends = [f"worker {worker} ({first_line(problem)})" for worker, problem in worker_exceptions.items()]
        print(f"ended: {', '.join(ends)}", flush=True)
        if final := [kind for kind in (BadInput, Diverged) if kind.exit_code in codes]:
            line = f"a worker ended with exit code {final[0].exit_code}, see its line"
            raise ray_train.ControllerError(final[0](line))
        if codes == {Stopped.exit_code}:
            raise ray_train.PreemptionError(ray_train.PreemptionInfo(None, {}))


def code_of(failed: ray_train.TrainingFailedError) -> int:
    """Prints why Ray ended the training; returns the exit code of the worker for which it did, or 1."""
    cause = getattr(failed, "controller_failure", failed)
    reason, code = (str(cause), cause.exit_code) if isinstance(cause, ProgramExit) else (first_line(cause), 1)
    print(f"ERROR: Ray does not start the workers again: {reason}", file=sys.stderr)
    return code


def report_to_ray(task: Any) -> None:
    """Has task.on_report give each row of metrics.csv to ray.train.report too. Call it on all workers of a group.

    A report ends when every worker has made one, but the engine calls the hook on the chief only. So a thread reports
    nothing, again and again, on each of the others.
    """
    users = getattr(task, "on_report", None)

    def on_report(row: dict[str, Any], *rest: Any) -> None:
        ray_train.report(row)
        if users:
            users(row, *rest)

    def join_reports() -> None:
        with contextlib.suppress(ray.exceptions.RayError):  # When the group ends.
            while True:
                ray_train.report({})

    logging.getLogger().setLevel(logging.WARNING)  # Ray lowers it, and then prints two lines for each report.
    task.on_report = on_report
    if ray_train.get_context().get_world_rank():
        threading.Thread(target=join_reports, daemon=True).start()


def start_ray(least: int, needs: dict[str, float]) -> None:
    """Joins the Ray cluster, or starts one here; says if it has no room for `least` workers with these `needs` each."""
    os.environ.update(DEFAULTS | os.environ)
    ray.init(logging_level=logging.ERROR, logging_config=ray.LoggingConfig(log_level="ERROR"))
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = int(sum(min(node.get(name, 0) // need for name, need in needs.items()) for node in nodes))
    if room < least:
        print(
            f"waiting: the nodes have room for {room} worker(s) that need {needs}, and at least {least} are needed: "
            "add nodes, or start again with fewer --workers, or with --min-workers",
            flush=True,
        )
