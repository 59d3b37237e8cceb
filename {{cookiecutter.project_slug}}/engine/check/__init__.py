"""python train.py --check: runs the hooks on a few batches and reports what to fix.

program   what --check and the evaluation use of train.py
check     the findings
measure   what one replica and two compute of the same batches
"""
