"""python train.py --check: checks your hooks on a few batches and reports what to fix.

check     runs the checks and prints their results
checks    the checks, one after the other
examples  checks of the examples, of their batches, and of predictions
causes    why the losses of one replica and of two differ
steps     checks of what the steps use: sample weights, regularizers, metrics
measure   the results of one replica or several for the same batches
recorder  optimizers that record the gradients instead of training with them
results   the result of a check, and which measured results differ
"""

from engine.check.check import check_task

__all__ = ["check_task"]
