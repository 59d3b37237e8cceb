"""The reports of a run. metrics.csv is the source; the console, TensorBoard and curves.png show the same numbers.

report      takes every row, and hands it to the outputs below
tables      the CSV files
summaries   TensorBoard
curves      curves.png
comparison  --compare: several runs in one table
goodput     goodput.json: how the seconds of a run were spent
"""

from engine.report.comparison import compare
from engine.report.report import Report

__all__ = ["Report", "compare"]
