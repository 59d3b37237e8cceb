"""The types of examples as JSON, and their tensors by name."""

import json
from typing import Any

import pytest
import tensorflow as tf

from engine.data.element_spec import decode, encode, leaves

SPECS = {
    "float32[8, 8, 1]": tf.TensorSpec([8, 8, 1], tf.float32),
    "string[]": tf.TensorSpec([], tf.string),
    "bfloat16[None, 3]": tf.TensorSpec([None, 3], tf.bfloat16),
    "uint8[...]": tf.TensorSpec(None, tf.uint8),
}


@pytest.mark.parametrize("text", SPECS)
def test_tensor_is_text_that_is_read_again(text: str) -> None:
    assert encode(SPECS[text]) == text
    assert decode(text) == SPECS[text]


def test_structure_survives_json() -> None:
    first, second, third, fourth = SPECS.values()
    spec = ({"b": first, "a": (second, {"c": third})}, fourth)
    assert decode(json.loads(json.dumps(encode(spec)))) == spec
    dataset = tf.data.Dataset.from_generator(lambda: iter(()), output_signature=spec)
    assert decode(encode(dataset.element_spec)) == dataset.element_spec


def test_what_is_no_tensor_is_named_and_refused() -> None:
    ragged = tf.RaggedTensorSpec([None, None], tf.int32)
    assert encode((ragged, SPECS["string[]"])) == ("RaggedTensorSpec", "string[]")
    with pytest.raises(ValueError, match="RaggedTensorSpec is not the element spec of a tensor"):
        decode(encode({"words": ragged}))


@pytest.mark.parametrize(
    ("structure", "names"),
    [
        (1, ["features"]),
        ((1, 2), ["features/0", "features/1"]),
        ({"b": 1, "a": {"y": 2, "x": (3, 4)}}, ["a/x/0", "a/x/1", "a/y", "b"]),
    ],
)
def test_leaves_are_named_in_the_order_of_tensorflow(structure: Any, names: list[str]) -> None:
    assert list(leaves(structure)) == names
    assert list(leaves(structure).values()) == tf.nest.flatten(structure)
