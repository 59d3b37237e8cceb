"""The reports of a run. metrics.csv is the source; the console, TensorBoard and curves.png show the same numbers.

report  takes every row, and hands it to all outputs; TensorBoard and goodput.json
tables  the CSV files; --compare, several runs in one table
curves  curves.png
"""

from engine.report.report import Report
from engine.report.tables import compare

__all__ = ["Report", "compare"]
