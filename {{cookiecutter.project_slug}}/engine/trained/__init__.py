"""Uses of a finished run: its best weights in a model, predictions, and files for other programs.

loading      the best weights of a run in the task's model, without the run's data and devices
predictions  predict.py: from examples to arrays, and to a file
export       train.py --export
"""

from engine.trained.export import export

__all__ = ["export"]
