"""Which of two validation scores is the better one."""

import math
import re

from engine.errors import BadInput

LOWER_IS_BETTER = {"loss", "error", "mae", "mse", "rmse", "mape", "perplexity", "divergence", "entropy"}
HIGHER_IS_BETTER = {"accuracy", "auc", "precision", "recall", "f1", "iou", "r2", "similarity", "score"}


def resolve_direction(monitor: str, direction: str) -> str:
    """Returns "min" or "max": `direction` itself, or for "auto" what the words in the metric's name say.

    Raises:
        BadInput: the direction is "auto" and the name does not tell.
    """
    if direction != "auto":
        return direction
    words = set(re.split(r"[^a-z0-9]+", monitor.rsplit("/", 1)[-1].lower()))
    lower, higher = bool(words & LOWER_IS_BETTER), bool(words & HIGHER_IS_BETTER)
    if lower == higher:
        raise BadInput(
            f"--monitor {monitor} does not tell whether lower or higher is better: say --monitor-direction min or max"
        )
    return "min" if lower else "max"


def is_better(score: float, best_score: float | None, direction: str) -> bool:
    """Returns whether `score` improves on the best so far (None: there is none). NaN improves on nothing else."""
    if best_score is None or math.isnan(best_score):
        return best_score is None or not math.isnan(score)
    return score < best_score if direction == "min" else score > best_score
