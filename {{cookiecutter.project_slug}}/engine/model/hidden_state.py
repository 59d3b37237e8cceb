"""Variables that Keras does not list: a layer's own tf.Variable, a tf.random.Generator's, a recurrent layer's state.

The steps use them all the same, so they are saved and restored with the rest. What no checkpoint can hold is refused.
"""

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from engine.errors import BadInput
from engine.model.replicas import is_seed
from engine.tracing import Traced, look_at

# On several replicas such a generator fails, because Keras makes one in each replica's thread.
UNSEEDED = (
    "task.train_step draws from keras.random without a seed, which fails on several replicas: give a layer a "
    "keras.random.SeedGenerator and pass it as seed"
)


@contextlib.contextmanager
def recorded_variables() -> Iterator[list[weakref.ref]]:
    """Yields a list that gets every variable that is made inside; one that is dropped again is not kept alive."""
    made: list[weakref.ref] = []

    def note(next_creator: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        variable = next_creator(**options)
        made.append(weakref.ref(variable))
        return variable

    with tf.variable_creator_scope(note):
        yield made


class HiddenState:
    """The variables that the steps use and Keras does not list. The steps are traced when that is first asked for.

    Attributes:
        unlisted: those that the hooks made, whether a step uses them or not, under unique names.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        made: Iterable[weakref.ref],
        listed: Iterable[tf.Variable],
        graph: Callable[[str], tf.Graph | None],
        unsaved: Iterable[tf.Variable] = (),
    ) -> None:
        """`made` are all variables that the hooks made in the strategy's scope, `listed` those that Keras lists.

        `graph` returns the graph of a split's steps, or None if other processes run them, or none does. A step may
        change the `unsaved`, which are for reports only.
        """
        self._local_results = strategy.experimental_local_results
        self._graph = graph
        self._unsaved = self._handles(unsaved)
        known = self._handles(listed) | self._unsaved
        # Numbered over all of them, so that a name does not depend on which ones a graph uses.
        self.unlisted: dict[str, tf.Variable] = {}
        times: collections.Counter[str] = collections.Counter()
        for each in made:
            if (variable := each()) is None or self._handles([variable]) & known:
                continue
            name = f"hidden/{variable.name.removesuffix(':0')}"
            self.unlisted[f"{name}#{times[name]}" if times[name] else name] = variable
            times[name] += 1

    @functools.cached_property
    def training(self) -> Traced | None:
        """What the training steps do; traces them. None if other processes run them."""
        try:
            graph = self._graph("train")
        except Exception as problem:
            if "seed_generator_state" in str(problem):
                raise BadInput(UNSEEDED) from problem
            raise
        return None if graph is None else look_at(graph)

    @functools.cached_property
    def validation(self) -> Traced | None:
        """What the validation steps do; traces them. Without a validation those of the test, if there is one."""
        graphs = (self._graph(split) for split in ("validation", "test"))
        return next((look_at(graph) for graph in graphs if graph is not None), None)

    def changed(self) -> dict[str, tf.Variable]:
        """Returns those that a step changes: the checkpoints hold them."""
        return self._among({handle for each in (self.training, self.validation) if each for handle in each.changed})

    def used_in_validation(self) -> dict[str, tf.Variable]:
        """Returns those that the validation uses: they are kept with the best weights. Without one, the training's."""
        traced = self.validation or self.training
        return self._among(traced.used if traced else ())

    def check(self, saved: Iterable[tf.Variable]) -> None:
        """Raises BadInput if a step changes something besides the variables that a checkpoint holds."""
        kept = self._handles(saved) | self._unsaved
        for step, traced in (("train_step", self.training), ("validation_step", self.validation)):
            if traced is None:
                continue
            for key, name in traced.changed.items():
                if not name or key in kept:
                    continue
                if is_seed(name.removesuffix(":0")):
                    raise BadInput(UNSEEDED)
                raise BadInput(
                    f"task.{step} changes the variable {name}, which no checkpoint holds, because it was made outside "
                    "the create_* hooks: make it in one of them"
                )
            if traced.table_changes:
                raise BadInput(
                    f"task.{step} changes a lookup table, which no checkpoint holds: {traced.table_changes[0]}: fill "
                    "it in a create_* hook, or keep a tf.Variable instead"
                )

    def _handles(self, variables: Iterable[tf.Variable]) -> set[int]:
        return {id(each.handle) for variable in variables for each in self._local_results(variable)}

    def _among(self, handles: Iterable[int]) -> dict[str, tf.Variable]:
        return {
            name: variable
            for name, variable in self.unlisted.items()
            if not self._handles([variable]).isdisjoint(handles)
        }
