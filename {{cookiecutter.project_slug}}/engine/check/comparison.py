"""What a check returns, what is measured, and which measured values differ by more than rounding."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from engine.errors import BadInput
from engine.model.metrics import ResultNames
from engine.tracing import Traced, unrepeatable

TOLERANCE = 1e-4  # For gradients and updates: they round more than losses and metrics do.
PROMISE = 1e-5  # For losses and metrics.
MARGIN = 10  # One replica and two round many more numbers differently, not only the weights.
LOSS = "loss"  # Beside the names of the variables.

Arrays = dict[str, np.ndarray]  # Variable -> its value, gradient or change.
BatchStacks = list[tuple[Any, int, int]]  # Stacks, the first batch to take in each, and how many to take.


class Check(NamedTuple):
    """The result of a check. `where` is a hook or a setting; `text` is a fact, or a fault and how to fix it."""

    ok: bool
    where: str
    text: str
    compared: bool = True  # Otherwise `text` says why nothing was compared.


class Layers(NamedTuple):
    """The names of the layers that make one replica and two differ."""

    random: list[str]
    still_random: list[str]  # Random layers that cannot be switched off.
    synchronized: list[str]  # They normalize the batches of all replicas together.
    unsynchronized: list[str]  # Layers that were not synchronized until the check did it.


class Measured(NamedTuple):
    """The results of some replicas for the same batches, from the same weights."""

    stacks: BatchStacks  # The last batch has padding in its second half, which is the second replica's.
    batches: list[Arrays]  # The loss of each, the gradients, and what else a step assigns equally on all replicas.
    nearby: list[Arrays]  # The same from weights nearby.
    rounding: dict[str, float]  # How much they change when the weights change by roundings.
    metrics: dict[str, Any]  # What `measure.counted` returns, of all datasets.
    without_gradient: list[str]
    per_replica: list[str]  # The weights that differ between the replicas afterwards.
    layers: Layers

    @property
    def losses(self) -> list[float]:
        """The loss of each batch."""
        return [float(arrays[LOSS]) for arrays in self.batches]


def check_repeats(hook: str, results: str, traced: Traced, *, repeats: bool) -> Iterator[Check]:
    """Raises BadInput if a hook draws its results again each time, because such results cannot be compared."""
    draws, python = unrepeatable(traced, hook)
    if draws:
        raise BadInput(f"task.{hook}: {draws[0]}")
    if not repeats:
        why = python[0] if python else "let them depend on its arguments alone, not on the time or on earlier calls"
        raise BadInput(f"task.{hook} returned other {results} the second time: {why}")
    for text in python:
        yield Check(True, f"task.py {hook}", f"the same {results} twice, though {text}")
    for text in traced.shared_seeds:
        yield Check(True, f"task.py {hook}", f"the same {results} twice; {text}")


def hook_of_step(task: Any, hook: str, split: str = "train") -> str:
    """Returns "task.py <hook>" if the task has this hook, otherwise the step of the split."""
    step = "train_step" if split == "train" else "evaluation_step"
    return f"task.py {hook if hasattr(task, hook) else step}"


def close(one: Any, two: Any, *, tolerance: float = TOLERANCE, floor: float = 1e-9) -> bool:
    """Returns whether two numbers or arrays differ by at most `tolerance` of the largest value, or by `floor`."""
    atol = tolerance * max(largest(one), largest(two)) + floor
    return bool(np.allclose(one, two, rtol=0.0, atol=atol, equal_nan=True))


def differing_loss(one: Measured, two: Measured) -> tuple[str, float, float] | None:
    """Returns the first loss that differs by more than rounding, on one replica and on two, after its kind of batch."""
    floor = MARGIN * one.rounding[LOSS]
    for batch, (loss, of_two) in enumerate(zip(one.losses, two.losses, strict=True), start=1):
        if not close(loss, of_two, tolerance=PROMISE, floor=floor):
            return " of a batch whose second half is padding" * (batch == len(one.losses)), loss, of_two
    return None


def differing_gradients(one: Measured, two: Measured) -> list[str]:
    """Returns the names of the variables whose gradients of any batch differ by more than rounding.

    `one` is the result of one replica. Rounding can switch a ReLU or a maximum, and change the gradient of a batch by a
    hundredth; but with weights nearby it does not do the same, so only what differs with both is a fault.
    """
    differing: set[str] = set()
    for batch in zip(one.batches, two.batches, one.nearby, two.nearby, strict=True):
        at_weights, nearby = (differing_arrays(*pair, one.rounding) for pair in (batch[:2], batch[2:]))
        differing.update(set(at_weights) & set(nearby))
    return [name for name in one.rounding if name in differing and name != LOSS]


def differing_arrays(one: Arrays, two: Arrays, rounding: Mapping[str, float]) -> list[str]:
    """Returns the names of the variables that differ by more than rounding."""
    # The gradient of a bias before a normalization is zero except for rounding, which differs.
    zero = 1e-6 * max(map(largest, one.values()), default=0.0)
    return [name for name in one if not close(one[name], two[name], floor=MARGIN * (zero + rounding[name]))]


def differing_metrics(names: ResultNames, one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """Returns the names that differ by more than rounding in both; of an array of results, its first such element."""
    differing: dict[str, str] = {}
    for name, value in one.items():
        other = two.get(name, value)
        if np.shape(value) == np.shape(other) and not close(value, other, tolerance=PROMISE):
            differing.setdefault(names.arrays.get(name, name), name)
    return list(differing.values())


def largest(values: Any) -> float:
    """Returns the largest absolute value of a number or an array that is finite; 0 if there is none."""
    return float(np.abs(np.nan_to_num(values, posinf=0.0, neginf=0.0)).max(initial=0.0))
