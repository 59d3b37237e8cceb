"""What is special to this task; write your own in its place."""

import dataclasses
from pathlib import Path

from config import Config

import numpy as np
import tensorflow as tf

import task
import train


def test_images_are_shifted_by_at_most_a_pixel_and_in_training_only(settings: Config) -> None:
    task.config = settings
    image = tf.constant(np.arange(64).reshape(8, 8, 1), tf.float32)
    scaled = np.pad(image.numpy() / np.float32(task.BRIGHTEST["digits"]), ((1, 1), (1, 1), (0, 0)))
    shifted = {scaled[y : y + 8, x : x + 8].tobytes() for y in range(3) for x in range(3)}
    drawn = set()
    for number in range(100):
        seed = tf.constant([settings.seed, number])
        drawn.add(task.prepare_example(image, 0, training=True, seed=seed)[0].numpy().tobytes())
        unshifted, _ = task.prepare_example(image, 0, training=False, seed=seed)
        np.testing.assert_array_equal(unshifted, scaled[1:9, 1:9])
    assert drawn == shifted


def test_predictions_are_probabilities_in_float32_and_the_likeliest_class(settings: Config) -> None:
    train.build(dataclasses.replace(settings, precision="mixed_bfloat16"))
    features, *_ = next(train.batches["validation"].one_by_one())
    predicted = task.predict_step(features)
    assert predicted["probabilities"].dtype == tf.float32
    np.testing.assert_allclose(tf.reduce_sum(predicted["probabilities"], axis=-1), 1.0, rtol=1e-5)
    np.testing.assert_array_equal(predicted["label"], tf.argmax(task.model(features, training=False), axis=-1))


def test_inputs_are_read_as_load_examples_returns_them(settings: Config, tmp_path: Path) -> None:
    task.config = settings
    images = np.stack([features for features, _ in task.load_examples("test").as_numpy_iterator()])
    np.save(tmp_path / "images.npy", images)
    names, features = zip(*task.read_inputs(tmp_path / "images.npy"), strict=True)
    assert names == tuple(range(len(images)))
    np.testing.assert_array_equal(features, images)
