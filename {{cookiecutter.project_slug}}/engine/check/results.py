"""What a check returns, and which results differ by more than rounding."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from engine.check.measure import LOSS, Arrays, Measured
from engine.errors import BadInput
from engine.model.metrics import ResultNames

TOLERANCE = 1e-4  # Of gradients and updates, whose rounding is larger than that of the results made of them.
PROMISE = 1e-5  # Of losses and metrics.
MARGIN = 10  # One replica and two round many more numbers differently, not only the weights.


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of a check. `where` is a hook or a setting; `text` is a fact, or a fault and how to fix it."""

    ok: bool
    where: str
    text: str


def check_repeats(hook: str, results: str, draws: list[str], python: list[str], *, repeats: bool) -> Iterator[Check]:
    """Raises BadInput if a hook draws its results again each time, because such results cannot be compared."""
    if draws:
        raise BadInput(f"task.{hook}: {draws[0]}")
    if not repeats:
        why = python[0] if python else "let them depend on its arguments alone, not on the time or on earlier calls"
        raise BadInput(f"task.{hook} returned other {results} the second time: {why}")
    for text in python:
        yield Check(True, f"task.py {hook}", f"the same {results} twice, though {text}")


def close(one: Any, other: Any, *, tolerance: float = TOLERANCE, floor: float = 1e-9) -> bool:
    """Returns whether two numbers or arrays differ by at most `tolerance` of the largest value, or by `floor`."""
    one, other = np.asarray(one), np.asarray(other)
    scale = max(np.abs(np.nan_to_num(each)).max(initial=0.0) for each in (one, other))
    return bool(np.allclose(one, other, rtol=0.0, atol=tolerance * scale + floor, equal_nan=True))


def as_texts(one: float, other: float) -> tuple[str, str]:
    """Returns two numbers with six digits, or with as many as differ."""
    texts = ((f"{one:.{digits}g}", f"{other:.{digits}g}") for digits in range(6, 18))
    return next((pair for pair in texts if pair[0] != pair[1]), (f"{one:.6g}", f"{other:.6g}"))


def hook_of_step(task: Any, hook: str, split: str = "train") -> str:
    """Returns "task.py <hook>" if the task has this hook, otherwise the step of the split."""
    if hasattr(task, hook):
        return f"task.py {hook}"
    return "task.py train_step" if split == "train" else "task.py evaluation_step"


def differing_gradients(one: Measured, other: Measured) -> list[str]:
    """Returns the names of the variables whose gradients of any batch differ by more than rounding.

    `one` is the result of one replica. Rounding can switch a ReLU or a maximum, and change the gradient of a batch by a
    hundredth; but with weights nearby it does not do the same, so only what differs with both is a fault.
    """
    differing: set[str] = set()
    for batch in zip(one.batches, other.batches, one.nearby, other.nearby, strict=True):
        found = set(differing_arrays(*batch[:2], one.rounding))
        differing |= found and found & set(differing_arrays(*batch[2:], one.rounding))
    return [name for name in one.rounding if name in differing and name != LOSS]


def differing_metrics(names: ResultNames, one: Mapping[str, float], other: Mapping[str, float]) -> list[str]:
    """Returns the names of the metrics that differ by more than rounding; of an array, its first such element."""
    differing: dict[str, str] = {}
    for name, value in one.items():
        if not close(value, other[name], tolerance=PROMISE):
            differing.setdefault(names.arrays.get(name, name), name)
    return list(differing.values())


def differing_arrays(one: Arrays, other: Arrays, rounding: Mapping[str, float]) -> list[str]:
    """Returns the names of the variables that differ by more than rounding."""
    # The gradient of a bias before a normalization is zero except for rounding, which differs.
    zero = 1e-6 * max((float(np.abs(array).max(initial=0.0)) for array in one.values()), default=0.0)
    return [name for name in one if not close(one[name], other[name], floor=MARGIN * (zero + rounding[name]))]
