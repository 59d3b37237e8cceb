"""The types of examples as JSON, and their tensors by name."""

import json

import pytest
import tensorflow as tf

from engine.data.element_spec import decode, encode, leaves

SPECS = {
    "float32[8, 8, 1]": tf.TensorSpec([8, 8, 1], tf.float32),
    "string[]": tf.TensorSpec([], tf.string),
    "bfloat16[None, 3]": tf.TensorSpec([None, 3], tf.bfloat16),
    "uint8[...]": tf.TensorSpec(None, tf.uint8),
}


def test_structure_survives_json_and_what_is_no_tensor_is_named_and_refused() -> None:
    assert encode(tuple(SPECS.values())) == tuple(SPECS)
    first, second, third, fourth = SPECS.values()
    spec = ({"b": first, "a": (second, {"c": third})}, fourth)
    assert decode(json.loads(json.dumps(encode(spec)))) == spec
    ragged = tf.RaggedTensorSpec([None, None], tf.int32)
    assert encode((ragged, second)) == ("RaggedTensorSpec", "string[]")
    with pytest.raises(ValueError, match="RaggedTensorSpec is not the element spec of a tensor"):
        decode(encode({"words": ragged}))


def test_leaves_are_named_in_the_order_of_tensorflow() -> None:
    for structure, names in (
        (1, ["features"]),
        ((1, 2), ["features/0", "features/1"]),
        ({"b": 1, "a": {"y": 2, "x": (3, 4)}}, ["a/x/0", "a/x/1", "a/y", "b"]),
    ):
        assert list(leaves(structure)) == names
        assert list(leaves(structure).values()) == tf.nest.flatten(structure)
