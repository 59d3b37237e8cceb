"""The types of examples: as JSON, and their tensors by name.

A type is nested tuples and dictionaries of tf.TensorSpec. In JSON a tensor is text such as "float32[8, 8, 1]", where
None is a size in which examples differ, and "..." any shape.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf


def encode(spec: Any) -> Any:
    """Returns a type as JSON values. What is no tensor, such as a ragged one, becomes the name of its kind."""
    if isinstance(spec, Mapping):
        return {name: encode(each) for name, each in spec.items()}
    if isinstance(spec, tuple | list):
        return [encode(each) for each in spec]
    return leaf_text(spec)


def decode(value: Any) -> Any:
    """Returns the type that `encode` was given. Raises ValueError if it is of anything but tensors."""
    if isinstance(value, dict):
        return {name: decode(each) for name, each in value.items()}
    if isinstance(value, list):
        return tuple(decode(each) for each in value)
    found = re.fullmatch(r"(\w+)\[(.*)\]", str(value))
    if not found:
        raise ValueError(f"{value} is not the type of a tensor")
    sizes = re.findall(r"\d+|None", found[2])
    shape = None if found[2] == "..." else [None if each == "None" else int(each) for each in sizes]
    return tf.TensorSpec(shape, tf.as_dtype(found[1]))


def leaf_text(leaf: Any) -> str:
    """Returns the type of one tensor as text: "float32[8, 8, 1]"."""
    if not isinstance(leaf, tf.TensorSpec):
        return type(leaf).__name__
    return f"{leaf.dtype.name}[{'...' if leaf.shape.rank is None else ', '.join(map(str, leaf.shape))}]"


def batched(spec: Any, size: int | None = None) -> Any:
    """Returns the type of several such examples in one, [size, ...]; by default of any number."""
    return tf.nest.map_structure(
        lambda leaf: tf.TensorSpec(tf.TensorShape([size]).concatenate(leaf.shape), leaf.dtype), spec
    )


def leaves(spec: Any, name: str = "features") -> dict[str, Any]:
    """Returns the tensors of a structure by name, in TensorFlow's order.

    One tensor alone has the name given; those of a dictionary are called by their keys, those of a tuple by the name
    and their number: "features/0".
    """

    def walk(part: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        if isinstance(part, Mapping):
            for key in sorted(part):
                yield from walk(part[key], (*path, str(key)))
        elif isinstance(part, tuple):  # A list is an array of numbers, as for TensorFlow's datasets.
            for number, each in enumerate(part):
                yield from walk(each, (*(path or (name,)), str(number)))
        else:
            yield "/".join(path or (name,)), part

    return dict(walk(spec, ()))
