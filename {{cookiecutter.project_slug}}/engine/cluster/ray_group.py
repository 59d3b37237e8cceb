"""Connects deploy/ray_train.py to Ray: the exit codes of workers, their metrics, and the nodes that are missing."""

import contextlib
import logging
import os
import sys
import threading
import time
from typing import Any

import ray
from ray import train as ray_train

from engine.cluster.launcher import FINAL_CODES
from engine.errors import Stopped, first_line

SECONDS_BETWEEN_CHECKS = 5.0
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


class WorkerExit(Exception):
    """A worker has ended with an exit code of train.py that no restart fixes."""

    def __init__(self, code: int) -> None:
        super().__init__(code)  # Ray copies the exception to another process by its arguments.
        self.code = code

    def __str__(self) -> str:
        return f"a worker ended with exit code {self.code}, see its line"


class Restarts(ray_train.UserCallback):
    """Ends the training after a final exit code of train.py. Ray restarts after all others, and counts failures."""

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Any]) -> None:
        """Prints how workers ended, in one line; `worker_exceptions` has a SystemExit for an exit code.

        Raises ControllerError, after which Ray does not restart, and PreemptionError, which it does not count.
        """
        codes = {worker: getattr(problem, "code", None) for worker, problem in worker_exceptions.items()}
        ends = {
            worker: f"exit code {code}" if code else first_line(worker_exceptions[worker])
            for worker, code in codes.items()
        }
        print(f"ended: {', '.join(f'worker {worker} ({end})' for worker, end in ends.items())}", flush=True)
        if final := [code for code in codes.values() if code in FINAL_CODES]:
            raise ray_train.ControllerError(WorkerExit(final[0]))
        if set(codes.values()) == {Stopped.exit_code}:
            raise ray_train.PreemptionError(ray_train.PreemptionInfo(None, {}))


def code_of(failed: ray_train.TrainingFailedError) -> int:
    """Prints why Ray ended the training; returns the exit code of the worker for which it did, or 1."""
    cause = getattr(failed, "controller_failure", failed)
    reason, code = (str(cause), cause.code) if isinstance(cause, WorkerExit) else (first_line(cause), 1)
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


def room_for_workers(nodes: list[dict[str, Any]], needs: dict[str, float]) -> int:
    """Returns how many workers fit on the nodes, as ray.nodes() lists them; `needs` are the resources of a worker."""
    resources = [node["Resources"] for node in nodes if node["Alive"]]
    return int(sum(min(of_node.get(name, 0) // need for name, need in needs.items()) for of_node in resources))


def start_ray(least: int, needs: dict[str, float]) -> None:
    """Joins the Ray cluster, or starts one here; from then on a line says when it has room for too few workers.

    `least` is the number of workers that must fit, and `needs` are the resources of each.
    """
    os.environ.update(DEFAULTS | os.environ)
    ray.init(logging_level=logging.ERROR, logging_config=ray.LoggingConfig(log_level="ERROR"))
    threading.Thread(target=_report_missing_nodes, args=(least, needs), daemon=True).start()


def _report_missing_nodes(least: int, needs: dict[str, float]) -> None:
    before = least
    with contextlib.suppress(ray.exceptions.RayError):  # Ray does not answer when the program ends.
        while True:
            room = room_for_workers(ray.nodes(), needs)
            if room < least <= before:
                size = " and ".join(f"{need:g} {name}" for name, need in needs.items())
                print(
                    f"waiting: the nodes have room for {room} worker(s) of {size}, and at least {least} are needed: "
                    "add nodes, or start again with fewer --workers, or with --min-workers",
                    flush=True,
                )
            before = room
            time.sleep(SECONDS_BETWEEN_CHECKS)
