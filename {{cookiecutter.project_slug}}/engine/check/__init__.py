"""python train.py --check: checks your hooks on a few batches and reports what to fix.

command     runs the checks in their order, and prints a table of their results
examples    checks of the examples, of their batches, and of predictions
steps       checks that one replica and two agree, and of what the steps use: sample weights, regularizers, metrics
comparison  what a check returns, what is measured, and which measured values differ
measure     measures one replica or several on the same batches
recording   records the gradients of a step, which moves no weight until it is asked to
"""

from engine.check.command import check_task

__all__ = ["check_task"]
