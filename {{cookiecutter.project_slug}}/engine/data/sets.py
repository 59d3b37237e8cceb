"""What task.load_examples returns for a split: one set of examples, several by name, or none."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from engine.errors import BadInput


def each_set(found: Any, change: Callable[[Any], Any]) -> Any:
    """Returns what task.load_examples returned, with every set of it changed."""
    if isinstance(found, Mapping):
        return {name: change(each) for name, each in found.items()}
    return None if found is None else change(found)


def named(split: str, found: Any) -> dict[str, Any]:
    """Returns the sets that task.load_examples returned, as "validation", or each as "validation/<set>".

    Raises:
        BadInput: a dictionary is empty, or names a set with other characters than letters, digits, "_", "-" and ".".
    """
    if split == "train":  # There has to be one; what is none is refused where it is read.
        return {split: found}
    if not isinstance(found, Mapping):
        return {} if found is None else {split: found}
    if not found:
        raise BadInput(f"task.load_examples({split!r}) returned an empty dict: return None if there is no {split}")
    for name in found:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            raise BadInput(
                f"task.load_examples({split!r}) returned a set called {name!r}: use letters, digits, '_', '-' and '.'"
            )
    return {f"{split}/{name}": each for name, each in found.items()}


def hook_of(name: str) -> str:
    """Returns how a set's examples are asked for, for messages: "validation/easy" is of task.load_examples(...)."""
    split, _, of_several = name.partition("/")
    return f"task.load_examples({split!r})" + (f"[{of_several!r}]" if of_several else "")


def loaders(split: str, load_examples: Callable[..., Any], pipelines: int) -> dict[str, Callable[..., Any]]:
    """Returns what loads each set of a split, by its name; it is called as `load_examples` is, which loads all at once.

    Args:
        split: "train", "validation" or "test".
        load_examples: the hook.
        pipelines: how many processes share a batch; each loads files of its own if the hook takes an `input_context`.
    """
    if split == "train":
        return {split: load_examples}
    shards_by_file = pipelines > 1 and "input_context" in inspect.signature(load_examples).parameters
    first = {"input_context": tf.distribute.InputContext(pipelines, 0)} if shards_by_file else {}
    loaded = {0: named(split, load_examples(split, **first))}

    def loader(name: str) -> Callable[..., Any]:
        @functools.wraps(load_examples)  # Its parameters are looked at.
        def load(split: str, **options: Any) -> Any:
            worker = options["input_context"].input_pipeline_id if options else 0
            if name not in loaded.get(worker, {}):
                loaded[worker] = named(split, load_examples(split, **options))
            if name not in loaded[worker]:
                raise BadInput(f"{hook_of(name)} is missing for worker {worker}: return the same sets for all workers")
            return loaded[worker].pop(name)  # Not kept: it may hold arrays, which Examples may read into memory.

        return load

    return {name: loader(name) for name in loaded[0]}
