"""Unlisted variables, which Keras does not know: a layer's own tf.Variable, a tf.random.Generator's, a stateful RNN's.

They are saved and restored with the rest. State that no checkpoint can contain is rejected.
"""

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from engine.errors import BadInput
from engine.model.variables import is_seed
from engine.tracing import Traced, look_at

# On several replicas an unseeded generator fails, because Keras makes one in each replica's thread.
UNSEEDED = (
    "task.train_step draws from keras.random without a seed, which fails on several replicas: draw from a seed of each "
    "example, see docs/steps.md, or give a layer a keras.random.SeedGenerator and pass it as seed"
)


@contextlib.contextmanager
def recorded_variables() -> Iterator[list[weakref.ref]]:
    """Yields a list that gets every variable that is made inside, without keeping it alive."""
    recorded: list[weakref.ref] = []

    def record(next_creator: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        variable = next_creator(**options)
        recorded.append(weakref.ref(variable))
        return variable

    with tf.variable_creator_scope(record):
        yield recorded


def is_random_state(path: str) -> bool:
    """Returns whether the variable of this path is the state of a SeedGenerator or of a tf.random.Generator."""
    return is_seed(path) or path.rsplit("/", 1)[-1].startswith("StateVar")


class HiddenState:
    """The unlisted variables that the steps use; `unlisted` has all that the hooks made, under unique names."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        recorded: Iterable[weakref.ref],
        listed: Iterable[tf.Variable],
        graph: Callable[[str], tf.Graph | None],
    ) -> None:
        """Traces nothing yet.

        `recorded` are all variables that the hooks made, from `recorded_variables`, and `listed` those that Keras
        lists. `graph` returns the graph of a split's steps; None if other processes run them, or there are none.
        """
        self._local_results = strategy.experimental_local_results
        self._graph = graph
        known = self._handles(listed)
        # All are numbered, so that a name does not depend on which variables a graph uses.
        self.unlisted: dict[str, tf.Variable] = {}
        times: collections.Counter[str] = collections.Counter()
        for each in recorded:
            if (variable := each()) is None or self._handles([variable]) & known:
                continue
            name = f"hidden/{variable.name.removesuffix(':0')}"
            self.unlisted[f"{name}#{times[name]}" if times[name] else name] = variable
            times[name] += 1

    @functools.cached_property
    def training(self) -> Traced | None:
        """The traced training steps; None if other processes run them."""
        try:
            graph = self._graph("train")
        except Exception as problem:
            if "seed_generator_state" in str(problem):
                raise BadInput(UNSEEDED) from problem
            raise
        return None if graph is None else look_at(graph)

    @functools.cached_property
    def evaluation(self) -> Traced | None:
        """The traced validation steps, or test steps if there is no validation; None without either."""
        graphs = (self._graph(split) for split in ("validation", "test"))
        return next((look_at(graph) for graph in graphs if graph is not None), None)

    def changed(self) -> dict[str, tf.Variable]:
        """Returns the variables that a step changes: the checkpoints contain them."""
        traced = [each for each in (self.training, self.evaluation) if each]
        return self._among({handle for each in traced for handle in each.changed})

    def used_in_evaluation(self) -> dict[str, tf.Variable]:
        """Returns the variables that an evaluation, or else training, uses: they belong to the best weights."""
        traced = self.evaluation or self.training
        return self._among(traced.used if traced else ())

    def seeds(self, listed: Mapping[str, tf.Variable]) -> list[tf.Variable]:
        """Returns the states of all random generators, listed or not, each replica's own."""
        variables = {**listed, **self.unlisted}.items()
        seeds = [each for name, each in variables if is_random_state(name)]
        return [each for seed in seeds for each in self._local_results(seed)]

    def check(self, saved: Iterable[tf.Variable]) -> None:
        """Raises BadInput if a step changes anything besides the variables that a checkpoint contains."""
        kept = self._handles(saved)
        for step, traced in (("train_step", self.training), ("evaluation_step", self.evaluation)):
            if traced is None:
                continue
            lost = [name for handle, name in traced.changed.items() if name and handle not in kept]
            if lost and is_seed(lost[0].removesuffix(":0")):
                raise BadInput(UNSEEDED)
            if lost:
                problem = f"changes the variable {lost[0]}, which no checkpoint contains"
                raise BadInput(f"task.{step} {problem}: make it in a create_* hook, not elsewhere")
            if traced.table_changes:
                problem = f"changes a lookup table, which no checkpoint contains: {traced.table_changes[0]}"
                raise BadInput(f"task.{step} {problem}: fill it in a create_* hook, or use a tf.Variable instead")

    def _handles(self, variables: Iterable[tf.Variable]) -> set[int]:
        return {id(each.handle) for variable in variables for each in self._local_results(variable)}

    def _among(self, handles: Iterable[int]) -> dict[str, tf.Variable]:
        wanted = set(handles)
        return {name: variable for name, variable in self.unlisted.items() if self._handles([variable]) & wanted}
