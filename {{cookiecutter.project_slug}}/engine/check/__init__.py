"""python train.py --check: checks your hooks on a few batches and reports what to fix.

check     runs the checks and prints their results
checks    the checks, one after the other
causes    why the losses of one replica and of two differ
measure   the results of one replica or several for the same batches
"""

from engine.check.check import check_task

__all__ = ["check_task"]
