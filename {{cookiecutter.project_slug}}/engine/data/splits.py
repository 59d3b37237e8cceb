"""The batches of every split, by the names of its datasets, as the hooks of task.py give them."""

import dataclasses
import functools
import gc
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from engine.data.batches import Batches
from engine.data.element_spec import as_text, unbatched
from engine.data.examples import DatasetExamples, Examples, hook_of, input_options
from engine.data.preparation import Preparation, pass_seed
from engine.data.records import Records
from engine.data.stacks import CompiledSteps, Stacks
from engine.errors import BadInput
from engine.files import until_read
from engine.settings import Settings

# Beside the run directory: the indexes of record files.
INDEXES = ".record_index"
PIECES_PER_WORKER = 4  # The pieces of an execution for each worker, so that a fast worker can take more of them.


def load_splits(
    splits: Sequence[str],
    task: Any,
    settings: Settings,
    strategy: tf.distribute.Strategy,
    workers: Any = None,
) -> "Splits":
    """Returns the batches of every dataset of the `splits`; one without examples is skipped.

    `workers` are engine.cluster.workers.Workers; without them, this process is the only one. Raises BadInput if hooks,
    settings and replicas do not fit together.
    """
    context = tf.distribute.InputContext(*((workers.count, workers.index) if workers else ()))
    evaluating, training = (
        Preparation(task.prepare_example, training=trains, pad_to=settings.pad_to or (), eager=settings.eager)
        for trains in (False, True)
    )
    if "training" not in inspect.signature(task.prepare_example).parameters:
        training = evaluating  # It is traced once for all splits.

    def load(split: str) -> dict[str, Batches]:
        kind: Callable[..., Batches] = Batches
        if isinstance(strategy, tf.distribute.ParameterServerStrategy) and split == "train":
            kind = functools.partial(WorkerBatches, load=functools.partial(task.load_examples, "train"))
        preparation = training if split == "train" else evaluating
        datasets = load_datasets(split, task.load_examples, settings)
        return {
            name: kind(name, examples, preparation, strategy, settings, context) for name, examples in datasets.items()
        }

    batches = Splits(load, splits)
    if settings.validate_every_steps and not any(dataset.split == "validation" for dataset in batches.values()):
        raise BadInput(
            f"--validate-every-steps {settings.validate_every_steps}: task.load_examples('validation') returned None, "
            "so there is no validation: remove the flag"
        )
    return batches


class Splits(dict[str, Batches]):
    """Dataset -> its batches: "train", "validation" or "validation/<dataset>", "test" or the like."""

    def __init__(self, load: Callable[[str], dict[str, Batches]], splits: Sequence[str]) -> None:
        """`load` calls task.load_examples for a split."""
        super().__init__((name, batches) for split in splits for name, batches in load(split).items())
        self._load = load
        check_same_structure(self)

    def of(self, split: str) -> list[Batches]:
        """Returns the batches of a split's datasets: of one, of several, or of none."""
        return [batches for batches in self.values() if batches.split == split]

    def reload(self, split: str) -> dict[str, Batches]:
        """Calls task.load_examples for a split again; returns the batches of its present examples.

        Raises BadInput, and changes nothing, if their datasets, shapes or dtypes are not those of before.
        """
        before = {batches.name: batches for batches in self.of(split)}
        if any(isinstance(batches, WorkerBatches) for batches in before.values()):
            raise BadInput(
                f"run.reload({split!r}): with --strategy parameter_server each worker loads its examples itself, once: "
                "use another strategy"
            )
        loaded = self._load(split)
        then, now = ({name: as_text(dataset.element_spec) for name, dataset in of.items()} for of in (before, loaded))
        if then != now:
            raise BadInput(
                f"{hook_of(split)} and task.prepare_example gave {then}, and later, for run.reload, {now}: the steps "
                "need the same datasets, structure, shapes and dtypes"
            )
        self.update(loaded)
        gc.collect()  # The examples of before are in circles of references.
        return loaded


def load_datasets(split: str, load_examples: Callable[..., Any], settings: Settings) -> dict[str, Examples]:
    """Calls task.load_examples for a split; returns the examples of each of its datasets, by name.

    Raises BadInput if they cannot be used.
    """
    shuffle_bytes = settings.shuffle_megabytes * 2**20 if split == "train" else None
    loaded = until_read(lambda: load_examples(split), hook_of(split), obeys_signals=True)
    datasets: dict[str, Examples] = {}
    for name, dataset in named(split, loaded).items():
        hook = hook_of(name)
        read: Callable[[], Examples]
        if isinstance(dataset, Records):  # Beside the run, so that all of its processes and starts share the folder.
            read = functools.partial(dataset.examples, hook, shuffle_bytes, settings.run_dir.parent / INDEXES)
        else:
            read = functools.partial(DatasetExamples, dataset, hook, shuffle_bytes)
        datasets[name] = until_read(read, hook, obeys_signals=True)
    return datasets


def named(split: str, loaded: Any) -> dict[str, Any]:
    """Returns the datasets that task.load_examples returned, as "validation" or "validation/<dataset>".

    Raises BadInput for a name of other characters than letters, digits, "_", "-" and ".".
    """
    if split == "train":  # There must be one; None or a dictionary is rejected where it is read.
        return {split: loaded}
    if not isinstance(loaded, Mapping):
        return {} if loaded is None else {split: loaded}
    hook = hook_of(split)
    for name in loaded:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            raise BadInput(f"{hook} returned a dataset called {name!r}: use letters, digits, '_', '-' and '.'")
    return {f"{split}/{name}": dataset for name, dataset in loaded.items()}


def each_dataset(loaded: Any, change: Callable[[Any], Any]) -> Any:
    """Returns what task.load_examples returned, with every dataset of it changed."""
    if isinstance(loaded, Mapping):
        return {name: change(dataset) for name, dataset in loaded.items()}
    return None if loaded is None else change(loaded)


def check_same_structure(batches: Mapping[str, Batches]) -> None:
    """Raises BadInput if the examples of a dataset differ from those of "train" in structure, shape or dtype."""
    # The third part is the sample weights.
    specs = {name: unbatched(dataset.element_spec[:2]) for name, dataset in batches.items()}
    for name, spec in specs.items():
        if spec != specs["train"]:
            raise BadInput(
                f"{hook_of(name)} and task.prepare_example gave {as_text(spec)}, but 'train' gave "
                f"{as_text(specs['train'])}: every dataset needs the same structure, shapes and dtypes"
            )


class WorkerBatches(Batches):
    """With parameter servers: training batches of which each worker has its own, its shard of the examples, repeated.

    The stacks of its iterator are the workers' iterators.
    """

    def __init__(self, *arguments: Any, load: Callable[[], Any]) -> None:
        """`load` calls task.load_examples; the other arguments are those of Batches. Raises BadInput as it does."""
        super().__init__(*arguments)
        if self.per_replica_batch_size > self.global_batch_size:  # None of its batches is padded.
            raise BadInput(
                f"--global-batch-size {self.global_batch_size}: --strategy parameter_server needs one that is "
                f"divisible by --micro-batches: use {self.per_replica_batch_size}"
            )
        self._load = load
        self.stack_size = self.steps_per_pass
        self.examples.may_be_cached = False  # Each worker loads them again.
        self.stacks = WorkerStacks(self.stacks.strategy, self.stacks.batch_spec, self.stacks.padding)

    def stacks_from(self, step: int) -> Iterator[Any]:
        """Yields the workers' iterators once for each pass from a step on, as a stack of all batches of the pass."""
        first_pass, first_step = divmod(step, self.steps_per_pass)
        coordinator = tf.distribute.coordinator.ClusterCoordinator(self.stacks.strategy)
        for number in itertools.count(first_pass):
            dataset = functools.partial(self.on_worker, number, first_step)
            yield iter(coordinator.create_per_worker_dataset(dataset))
            first_step = 0

    @tf.autograph.experimental.do_not_convert
    def on_worker(self, number: int, first_step: int) -> tf.data.Dataset:
        """Returns the batches of a worker in a pass, again and again, in its graph."""
        # Loaded where they are used, because a dataset of the chief's cannot be sent to a worker.
        examples = self.examples.for_worker(self._load)
        seed = pass_seed(self._seed, tf.constant(number, tf.int64))
        first = tf.constant(first_step * self.global_batch_size, tf.int64)
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        numbered = examples.one_by_one(self._shard, first, seed).shard(number_of_workers(), worker).repeat()
        batches = self._prepare_one_by_one(numbered, seed).batch(self.per_replica_batch_size, drop_remainder=True)
        if padding := self._prepared.padding:
            batches = batches.map(tf.autograph.experimental.do_not_convert(lambda *batch: padding.cut(batch)))
        return batches.prefetch(tf.data.AUTOTUNE).with_options(input_options())


class WorkerStacks(Stacks):
    """Stacks that are the workers' iterators, of which each worker sees its own."""

    @tf.autograph.experimental.do_not_convert
    def pick(self, stack: Any, index: tf.Tensor) -> Any:
        """Returns the worker's next batch."""
        return next(stack)

    def compile(self, steps: Callable[..., tf.Tensor]) -> CompiledSteps:
        return WorkerSteps(tf.function(steps), tf.distribute.coordinator.ClusterCoordinator(self.strategy))


@dataclasses.dataclass(frozen=True)
class WorkerSteps(CompiledSteps):
    """Steps that the workers take together."""

    coordinator: tf.distribute.coordinator.ClusterCoordinator  # A strategy has one: its constructor returns it again.

    def __call__(self, stack: Any, first: int | tf.Tensor, count: int | tf.Tensor) -> np.ndarray:
        """Has the workers take `count` steps; returns their losses ([count]), in any order."""
        pieces = np.array_split(np.arange(int(count)), min(int(count), PIECES_PER_WORKER * number_of_workers()))
        arguments = [(stack, tf.constant(0), tf.constant(len(piece))) for piece in pieces]
        losses = [self.coordinator.schedule(self.function, args=piece) for piece in arguments]
        self.coordinator.join()  # Raises what a worker has raised.
        return np.concatenate([loss.fetch() for loss in losses])

    def graph(self) -> None:
        """Returns None: the workers run the graph."""


def number_of_workers() -> int:
    """Returns how many workers the cluster of TF_CONFIG has."""
    return tf.distribute.cluster_resolver.TFConfigClusterResolver().cluster_spec().num_tasks("worker")
