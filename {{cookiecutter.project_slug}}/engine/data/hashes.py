"""Hashes of examples, by which a resumed run or another process notices that they differ."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf


def sha256_of(examples: Iterable[Any]) -> str:
    """Returns a hash of the values, dtypes and shapes of all tensors of some examples, in hex."""
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
