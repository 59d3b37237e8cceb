"""Element specs of examples, as text and JSON; the tensors of an example by name; its memory and its hash.

An element spec is nested tuples and dictionaries of tf.TensorSpec. In JSON a tensor is text such as "float32[8, 8, 1]",
where None is a size in which examples differ, and "..." any shape; before it, "ragged " or "sparse " may stand.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

# What TensorFlow adds to the bytes of a string, of an example in a shuffle buffer, and of each of its tensors.
BYTES_OF_STRING, BYTES_OF_ELEMENT, BYTES_OF_TENSOR = 40, 128, 64
BYTES_OF_TEXT = 2**14  # A guess: an element spec does not contain the length of a string.
KINDS = {"": tf.TensorSpec, "ragged ": tf.RaggedTensorSpec, "sparse ": tf.SparseTensorSpec}


def encode(spec: Any) -> Any:
    """Returns an element spec as JSON values; a leaf that is not a tensor of any kind becomes the name of its type."""
    return tf.nest.map_structure(leaf_text, spec)


def decode(value: Any) -> Any:
    """Returns the element spec that `encode` was given. Raises ValueError unless all its leaves are tensors."""
    if isinstance(value, dict):
        return {name: decode(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return tuple(decode(part) for part in value)
    match = re.fullmatch(r"(ragged |sparse |)(\w+)\[(.*)\]", str(value))
    if not match:
        raise ValueError(f"{value} is not the element spec of a tensor")
    sizes = re.findall(r"\d+|None", match[3])
    shape = None if match[3] == "..." else [None if size == "None" else int(size) for size in sizes]
    return KINDS[match[1]](shape, tf.as_dtype(match[2]))


def leaf_text(leaf: Any) -> str:
    """Returns the element spec of one tensor as text: "float32[8, 8, 1]"."""
    kind = next((kind for kind, spec in KINDS.items() if isinstance(leaf, spec)), None)
    if kind is None:
        return type(leaf).__name__
    if isinstance(leaf, tf.RaggedTensorSpec) and not leaf.ragged_rank:
        kind = ""  # The lengths of such tensors differ between examples only, so each example has a plain one.
    return f"{kind}{leaf.dtype.name}[{'...' if leaf.shape.rank is None else ', '.join(map(str, leaf.shape))}]"


def as_text(spec: Any) -> str:
    """Returns an element spec as one short line."""
    return str(encode(spec)).replace("'", "")


def batched(spec: Any, size: int | None = None) -> Any:
    """Returns the element spec of batches of such examples, [size, ...]; by default of any size."""
    return tf.nest.map_structure(
        lambda leaf: tf.TensorSpec(tf.TensorShape([size]).concatenate(leaf.shape), leaf.dtype), spec
    )


def unbatched(spec: Any) -> Any:
    """Returns the element spec of one example of batches, [n, ...]; leaves that are not tensors stay as they are."""
    return tf.nest.map_structure(
        lambda leaf: tf.TensorSpec(leaf.shape[1:], leaf.dtype) if isinstance(leaf, tf.TensorSpec) else leaf, spec
    )


def leaves(spec: Any) -> dict[str, Any]:
    """Returns the tensors of features by name, in TensorFlow's order.

    Tensors in a dictionary are named by their keys; a single tensor is "features", and tensors in a tuple "features/0".
    """

    def walk(part: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        if isinstance(part, Mapping):
            for key in sorted(part):
                yield from walk(part[key], (*path, str(key)))
        elif isinstance(part, tuple):  # A list is an array of numbers, as for TensorFlow's datasets.
            for number, item in enumerate(part):
                yield from walk(item, (*(path or ("features",)), str(number)))
        else:
            yield "/".join(path or ("features",)), part

    return dict(walk(spec, ()))


def is_static(spec: Any) -> bool:
    """Returns whether all leaves are tensors of known shapes."""
    return all(isinstance(leaf, tf.TensorSpec) and leaf.shape.is_fully_defined() for leaf in tf.nest.flatten(spec))


def is_exact(spec: Any) -> bool:
    """Returns whether the bytes of an example follow from its element spec: it has static shapes and no strings."""
    return is_static(spec) and all(leaf.dtype != tf.string for leaf in tf.nest.flatten(spec))


def bytes_of(spec: Any) -> int:
    """Returns the bytes of an element of static shapes; a guess if it has strings."""
    return sum(
        leaf.shape.num_elements() * (BYTES_OF_TEXT if leaf.dtype == tf.string else leaf.dtype.size)
        for leaf in tf.nest.flatten(spec)
    )


def bytes_in(element: Any) -> int:
    """Returns the bytes of an element, from its tensors."""
    size = 0
    for tensor in tf.nest.flatten(element, expand_composites=True):
        size += int(tf.size(tensor)) * (BYTES_OF_STRING if tensor.dtype == tf.string else tensor.dtype.size)
        if tensor.dtype == tf.string:
            size += int(tf.reduce_sum(tf.cast(tf.strings.length(tensor), tf.int64)))
    return size


def bytes_in_buffer(spec: Any, content: float) -> float:
    """Returns the bytes that an example takes in a shuffle buffer, of which its values take `content`."""
    return content + BYTES_OF_ELEMENT + BYTES_OF_TENSOR * len(tf.nest.flatten(spec, expand_composites=True))


def megabytes(size: int) -> str:
    """Returns a number of bytes as text: "512 MB"."""
    return f"{max(1, round(size / 2**20)):,} MB"


def sha256_of(examples: Iterable[Any]) -> str:
    """Returns a hash of the values, dtypes and shapes of all tensors of some examples, in hex.

    By it a resumed run, or another process, notices other examples.
    """
    sha256 = hashlib.sha256()
    for example in examples:
        for part in tf.nest.flatten(example, expand_composites=True):
            sha256.update(tf.io.serialize_tensor(part).numpy())
    return sha256.hexdigest()


def without_folder(parts: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """Returns texts without the folder that all have in common: the same files may lie elsewhere on each machine."""
    if parts[0].dtype != tf.string:
        return parts
    # Not commonpath, because texts may be no paths.
    texts = [text for part in parts for text in tf.reshape(part, [-1]).numpy().tolist()]
    folder, separator, _ = os.path.commonprefix(texts).rpartition(b"/")  # noqa: RUF071
    return [tf.strings.substr(part, len(folder + separator), tf.int32.max) for part in parts]
