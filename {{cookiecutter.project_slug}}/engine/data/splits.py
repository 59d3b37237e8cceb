"""The batches of every split, by the names of its datasets, as the hooks of task.py give them."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from engine.data.batches import Batches
from engine.data.element_spec import as_text, unbatched
from engine.data.examples import DatasetExamples, Examples, hook_of
from engine.data.preparation import Preparation
from engine.data.records import Records
from engine.data.worker_batches import WorkerBatches
from engine.errors import BadInput
from engine.files import until_read
from engine.settings import Settings

# Beside the run directory: the indexes of record files that are in folders that cannot be written.
INDEXES = ".record_index"


class Workers(Protocol):
    """The part of engine.cluster.workers.Workers that the batches need."""

    count: int
    index: int
    pool: Any  # With parameter servers, a WorkerPool.

    def gather(self, values: dict[str, np.ndarray], doing: str) -> dict[str, np.ndarray]: ...


def load_splits(
    splits: Sequence[str],
    task: Any,
    settings: Settings,
    strategy: tf.distribute.Strategy,
    workers: Workers | None = None,
) -> dict[str, Batches]:
    """Returns the batches of every dataset: "train", "validation" or "validation/<dataset>", "test" or the like.

    A split without examples is skipped. Without `workers` this process is the only one. Raises BadInput if hooks,
    settings and replicas do not fit together.
    """
    context = tf.distribute.InputContext(*((workers.count, workers.index) if workers else ()))
    evaluating, training = (
        Preparation(task.prepare_example, training=trains, pad_to=settings.pad_to or (), eager=settings.eager)
        for trains in (False, True)
    )
    if "training" not in inspect.signature(task.prepare_example).parameters:
        training = evaluating  # It is traced once for all splits.
    by_file = _takes_context(task.load_examples)
    batches: dict[str, Batches] = {}
    for split in splits:
        preparation = training if split == "train" else evaluating
        loaded = load_datasets(split, task.load_examples, settings, context)
        lengths = {name: [examples.length] for name, examples in loaded.items()}
        if by_file and workers:
            own = {name: np.array(length) for name, (length,) in lengths.items()}
            lengths = {name: of_all.tolist() for name, of_all in workers.gather(own, hook_of(split)).items()}
        for name, examples in loaded.items():
            arguments = name, examples, lengths[name], preparation, strategy, settings, context
            if workers and workers.pool and split == "train":
                load = functools.partial(task.load_examples, "train")
                batches[name] = WorkerBatches(*arguments, load=load, workers=workers.pool)
            else:
                batches[name] = Batches(*arguments, shards_by_file=by_file)
    check_same_structure(batches)
    if settings.validate_every_steps and not any(dataset.split == "validation" for dataset in batches.values()):
        raise BadInput(
            f"--validate-every-steps {settings.validate_every_steps}: task.load_examples('validation') returned None, "
            "so there is no validation: remove the flag"
        )
    return batches


def load_datasets(
    split: str, load_examples: Callable[..., Any], settings: Settings, context: tf.distribute.InputContext
) -> dict[str, Examples]:
    """Calls task.load_examples for a split; returns the examples of each of its datasets, by name.

    If the hook takes an `input_context`, they are those of this process only. Raises BadInput if they cannot be used.
    """
    shuffle_bytes = settings.shuffle_megabytes * 2**20 if split == "train" else None
    is_own = _takes_context(load_examples) and context.num_input_pipelines > 1
    load = functools.partial(load_examples, split, **({"input_context": context} if is_own else {}))
    datasets: dict[str, Examples] = {}
    for name, dataset in named(split, until_read(load, hook_of(split), obeys_signals=True)).items():
        hook = hook_of(name)
        if is_own and isinstance(dataset, Records):
            raise BadInput(
                f"{hook} takes an input_context and returned Records: remove it from load_examples; each worker reads "
                "its own shard anyway"
            )
        hook += f" for worker {context.input_pipeline_id} of {context.num_input_pipelines}" if is_own else ""
        read: Callable[[], Examples]
        if isinstance(dataset, Records):  # Beside the run, so that all of its processes and starts share the folder.
            read = functools.partial(dataset.examples, hook, shuffle_bytes, settings.run_dir.parent / INDEXES)
        else:
            read = functools.partial(DatasetExamples, dataset, hook, shuffle_bytes)
        datasets[name] = until_read(read, hook, obeys_signals=True)
    return datasets


def _takes_context(load_examples: Callable[..., Any]) -> bool:
    return "input_context" in inspect.signature(load_examples).parameters


def named(split: str, loaded: Any) -> dict[str, Any]:
    """Returns the datasets that task.load_examples returned, as "validation" or "validation/<dataset>".

    Raises BadInput for an empty dictionary, and for a name of other characters than letters, digits, "_", "-" and ".".
    """
    if split == "train":  # There must be one; None or a dictionary is rejected where it is read.
        return {split: loaded}
    if not isinstance(loaded, Mapping):
        return {} if loaded is None else {split: loaded}
    hook = hook_of(split)
    if not loaded:
        raise BadInput(f"{hook} returned an empty dict: return None if there is no {split}")
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
