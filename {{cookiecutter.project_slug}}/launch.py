"""Starts a local cluster of processes that run train.py together, and keeps it running.

    python launch.py --workers 2 -- --epochs 5                            two workers, the same results as one process
    python launch.py --workers 2 --max-restarts 20 -- --epochs 5          restarts the cluster when a process dies
    python launch.py --workers 4 --min-workers 2 -- --epochs 5            continues without workers that die
    python launch.py --workers 2 --parameter-servers 1 -- --epochs 5      asynchronous: --strategy parameter_server

Arguments after -- are for train.py. The workers share the GPUs in CUDA_VISIBLE_DEVICES, or all GPUs of the machine.
For several machines use Slurm or Kubernetes instead: see docs/clusters.md.
"""

import sys

from engine.cluster.launcher import main

if __name__ == "__main__":
    sys.exit(main(description=__doc__))
