"""python train.py --check: runs the hooks on a few batches and reports what to fix.

check    the findings
measure  what one replica and two compute of the same batches
"""
