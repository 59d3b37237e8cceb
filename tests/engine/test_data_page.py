"""The sources of docs/data.md, taken from the page as they stand there, and trained on."""

import os
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

import task
import train
from pages import blocks, put, sections

SOURCES = sections("data.md")
COUNTS = {"train": 120, "validation": 40, "test": 40}


@pytest.fixture
def arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns images (uint8) and labels of each split, and moves to a folder that has an empty folder data/."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("data")
    images, labels = load_digits(return_X_y=True)
    images = (images * 15).astype(np.uint8).reshape(-1, 8, 8, 1)
    ends = np.cumsum([0, *COUNTS.values()])
    return {split: (images[a:b], labels[a:b]) for split, a, b in zip(COUNTS, ends, ends[1:], strict=False)}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, float]]:
    """Trains on the source of a section for two epochs; returns the result."""

    def run(title: str, block: int = 0, *flags: str) -> dict[str, float]:
        put(blocks(SOURCES[title])[block], task, monkeypatch, tmp_path)
        result = train.main(["--epochs=2", "--global-batch-size=20", f"--run-dir={tmp_path / 'runs'}", *flags])
        loaded = sum(len(labels) for _, labels, _ in train.batches["test"].one_by_one())
        assert loaded == COUNTS["test"]
        return result

    return run


def test_arrays(arrays, trained) -> None:
    for split, (images, labels) in arrays.items():
        np.savez(f"data/{split}.npz", images=images.astype(np.float32), labels=labels.astype(np.int32))
    assert trained("Arrays")["step"] == 12


def test_record_files(arrays, trained) -> None:
    for split in arrays:
        write_records(split, *arrays[split])
    assert trained("Record files")["step"] == 12


def write_records(split: str, images: np.ndarray, labels: np.ndarray) -> None:
    for part in range(2):
        with tf.io.TFRecordWriter(f"data/{split}-{part}.tfrecord") as writer:
            for image, label in zip(images[part::2], labels[part::2], strict=True):
                example = tf.train.Example()
                example.features.feature["image"].bytes_list.value.append(tf.io.encode_png(image).numpy())
                example.features.feature["label"].int64_list.value.append(label)
                writer.write(example.SerializeToString())


@pytest.mark.long
@pytest.mark.parametrize("block", [0, 1])
def test_tensorflow_datasets(block: int, arrays, trained) -> None:
    import tensorflow_datasets as tfds

    features = tfds.features.FeaturesDict(
        {"image": tfds.features.Image(shape=(8, 8, 1)), "label": tfds.features.ClassLabel(num_classes=10)}
    )
    # The first block makes its own validation of the images to train on.
    parts = arrays if block else {"train": arrays["train"], "test": arrays["test"]}
    tfds.dataset_builders.store_as_tfds_dataset(
        name="digits",
        version="1.0.0",
        features=features,
        split_datasets={
            split: tf.data.Dataset.from_tensor_slices({"image": images, "label": labels})
            for split, (images, labels) in parts.items()
        },
        data_dir="data",
    )
    assert trained("TensorFlow Datasets", block)["step"] == (12 if block else 2 * (96 // 20))


@pytest.mark.long
def test_generator(arrays, trained) -> None:
    for split, (images, labels) in arrays.items():
        rows = np.concatenate([images.reshape(-1, 64), labels[:, None]], axis=1)
        np.savetxt(f"data/{split}.csv", rows, delimiter=",")
    assert trained("A generator")["step"] == 12


def test_images_in_folders(arrays, trained) -> None:
    for split, (images, labels) in arrays.items():
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            folder = Path("data", split, str(label))
            folder.mkdir(parents=True, exist_ok=True)
            keras.utils.save_img(folder / f"{number}.png", image, scale=False)
    assert trained("Images in folders")["step"] == 12


def test_tokenised_text(arrays, trained) -> None:
    random = np.random.default_rng(0)
    for split, count in COUNTS.items():
        with tf.io.TFRecordWriter(f"data/{split}.tfrecord") as writer:
            for label in np.arange(count) % 10:
                example = tf.train.Example()
                # Its tokens are from a range of its class.
                tokens = random.integers(100 * label + 1, 100 * label + 100, random.integers(3, 40))
                example.features.feature["tokens"].int64_list.value.extend(tokens)
                example.features.feature["label"].int64_list.value.append(label)
                writer.write(example.SerializeToString())
    result = trained("Tokenised text", 0, "--pad-to", "16", "32", "64", "--epochs=20", "--learning-rate=0.03")
    assert result["test/accuracy"] > 0.8
