"""python train.py --check: checks your hooks on a few batches and reports what to fix.

check     runs the checks and prints the findings
checks    the checks, one after the other
measure   what one replica and two compute of the same batches
layers    makes one replica and two comparable
"""

from engine.check.check import check_task

__all__ = [
    "check_task",
]
