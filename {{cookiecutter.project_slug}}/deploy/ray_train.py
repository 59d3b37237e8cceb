"""Runs train.py on a Ray cluster: python deploy/ray_train.py --workers 2 -- --epochs 30 (see docs/clusters.md)."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.cluster.launcher import START_ID
from engine.errors import BadInput, exit_codes

with exit_codes():
    try:
        from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig, TrainingFailedError
        from ray.train.tensorflow import TensorflowTrainer

        from engine.cluster.ray_group import Restarts, code_of, report_to_ray, start_ray
    except ImportError as problem:
        raise BadInput(f'Ray Train cannot be imported ({problem}): pip install -e ".[ray]"') from None
FOLDER, PROJECT = Path.cwd(), Path(__file__).resolve().parents[1]


def train_worker(given: dict) -> None:
    os.chdir(FOLDER)  # Ray has changed to a folder of its own.
    os.environ[START_ID] = given["start"]
    del os.environ["TF_USE_LEGACY_KERAS"]  # Ray sets it, and the project uses Keras 3.
    import task
    import train

    report_to_ray(task)
    train.main(given["arguments"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, required=True, help="workers that train")
    parser.add_argument("--min-workers", type=int, help="train with as few while nodes are missing; default: all")
    parser.add_argument("--cpus", type=float, default=1, help="CPUs of each worker")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each worker")
    parser.add_argument("--max-restarts", type=int, default=20, help="restarts after a failure")
    parser.add_argument("--resize-seconds", type=float, default=60, help="seconds between looks for added nodes")
    parser.add_argument("arguments", nargs="*", help="after --: the arguments of train.py")
    options = parser.parse_args()
    most, least = options.workers, options.min_workers or options.workers
    if not 1 <= least <= most:
        parser.error(f"--min-workers {least} must be from 1 to the number of --workers, {most}")
    needs = {name: each for name, each in (("CPU", options.cpus), ("GPU", options.gpus)) if each}
    given = {"arguments": options.arguments, "start": os.environ.get(START_ID, os.urandom(8).hex())}
    run = RunConfig(storage_path=tempfile.mkdtemp(), callbacks=[Restarts()], logging_config=LoggingConfig("CRITICAL"))
    run.failure_config = FailureConfig(max_failures=options.max_restarts)
    scaling = ScalingConfig(num_workers=most if least == most else (least, most), use_gpu=options.gpus > 0)
    scaling.resources_per_worker, scaling.elastic_resize_monitor_interval_s = needs, options.resize_seconds
    os.chdir(PROJECT)  # Ray's processes import from the folder of the program that starts them.
    start_ray(least, needs)
    try:
        TensorflowTrainer(train_worker, train_loop_config=given, scaling_config=scaling, run_config=run).fit()
    except TrainingFailedError as failed:
        sys.exit(code_of(failed))
