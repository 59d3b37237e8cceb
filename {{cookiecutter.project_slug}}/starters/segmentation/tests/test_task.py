"""What is special to images with masks: flipped alike, class weights, mean IoU with weights, and the shapes drawn."""

import dataclasses
import math
from pathlib import Path

from config import Config

import numpy as np
import pytest
import tensorflow as tf

import task
import train
from shapes import CLASSES, SIZE, covered, draw


def test_image_and_mask_are_flipped_alike() -> None:
    mask = np.arange(SIZE * SIZE).reshape(SIZE, SIZE) % 251
    image = np.repeat(mask[..., np.newaxis], 3, axis=-1)
    flipped = 0
    for number in range(40):
        seed = tf.constant([number, 7], tf.int64)
        features, labels = task.prepare_example(tf.constant(image), tf.constant(mask), training=True, seed=seed)
        np.testing.assert_array_equal(np.round((features[..., 1] + 1.0) * 127.5), labels)
        flipped += np.array_equal(labels, mask[:, ::-1])
        assert np.array_equal(labels, mask[:, ::-1]) or np.array_equal(labels, mask)
    assert 10 < flipped < 30
    _, labels = task.prepare_example(tf.constant(image), tf.constant(mask), training=False, seed=seed)
    np.testing.assert_array_equal(labels, mask)


def test_loss_and_metrics_equal_numpy(settings: Config) -> None:
    train.build(dataclasses.replace(settings, class_weights=(0.5, 1.0, 2.0, 7.0)))
    random = np.random.default_rng(0)
    logits = random.normal(size=(3, SIZE, SIZE, len(CLASSES))).astype("float32")
    masks = random.choice(len(CLASSES), size=(3, SIZE, SIZE), p=[0.7, 0.1, 0.1, 0.1]).astype("int32")
    weights = np.array([1.0, 0.0, 0.5], "float32")  # The second one is padding.
    loss, per_example_loss = task.compute_loss(tf.constant(masks), tf.constant(logits), tf.constant(weights))

    likelihoods = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    cross_entropy = -np.log(np.take_along_axis(likelihoods, masks[..., np.newaxis], -1)[..., 0])
    expected = (np.array([0.5, 1.0, 2.0, 7.0])[masks] * cross_entropy).sum(axis=(1, 2)) / SIZE**2
    np.testing.assert_allclose(per_example_loss, expected, rtol=1e-5)
    assert float(loss) == pytest.approx((weights * expected).sum() / settings.global_batch_size, rel=1e-5)

    task.update_metrics("test", tf.constant(masks), tf.constant(logits), per_example_loss, tf.constant(weights))
    results, predicted = train.run.objects.results("test"), logits.argmax(-1)

    def pixels(chosen: np.ndarray) -> float:
        return (chosen.sum(axis=(1, 2)) * weights).sum()

    ious = [
        pixels((masks == number) & (predicted == number)) / pixels((masks == number) | (predicted == number))
        for number in range(len(CLASSES))
    ]
    assert results["test/mean_iou"] == pytest.approx(np.mean(ious), rel=1e-5)
    assert results["test/accuracy"] == pytest.approx(pixels(masks == predicted) / (1.5 * SIZE**2), rel=1e-5)


def test_shapes_cover_their_areas_and_flip_to_themselves() -> None:
    y, x = np.mgrid[-20:21, -20:21]
    areas = {"circle": math.pi * 15**2, "square": 27**2, "triangle": 30 * 30 / 2}
    for shape, area in areas.items():
        pixels = covered(shape, x, y, radius=15)
        assert pixels.sum() == pytest.approx(area, rel=0.08), shape
        np.testing.assert_array_equal(pixels, pixels[:, ::-1])
    assert pixels[:20].sum() < pixels[21:].sum()  # The triangle's point is at the top.


def test_masks_lie_where_the_shapes_do() -> None:
    images, masks = draw(50, seed=4)
    assert set(np.unique(masks)) == set(range(len(CLASSES)))
    for image, mask in zip(images, masks, strict=True):
        # Outside of the shapes there is one color and noise; were the mask elsewhere, there would be a shape's too.
        background = image[mask == 0].astype("float32")
        spread = background - np.median(background, axis=0)
        assert (abs(spread) < 100).all()
        assert spread.std() < 25


def test_inputs_are_read_as_load_examples_returns_them(settings: Config, tmp_path: Path) -> None:
    task.config = settings
    images = np.stack([features for features, _ in task.load_examples("test").as_numpy_iterator()])
    np.save(tmp_path / "images.npy", images)
    names, features = zip(*task.read_inputs(tmp_path / "images.npy"), strict=True)
    assert names == tuple(range(len(images)))
    np.testing.assert_array_equal(features, images)
