"""The reports of a run. metrics.csv is the source; the console, TensorBoard and curves.png show the same numbers.

report      takes each row, and passes it to the others
tables      the CSV files
summaries   TensorBoard
curves      curves.png
comparison  --compare: several runs in one table
goodput     goodput.json: what the seconds of a run were spent on
"""

from engine.report.comparison import compare
from engine.report.report import Report

__all__ = ["Report", "compare"]
