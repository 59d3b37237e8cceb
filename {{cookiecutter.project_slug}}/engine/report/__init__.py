"""What a run shows of itself. metrics.csv is the source; the console, TensorBoard and curves.png show the same numbers.

report      takes each row, and gives it to the others
tables      metrics.csv, validations.csv and evaluations.csv
summaries   TensorBoard
steps       steps.csv, about a row a second
curves      curves.png
comparison  --compare: several runs in one picture and one table
"""

from engine.report.comparison import compare
from engine.report.report import Report

__all__ = ["Report", "compare"]
