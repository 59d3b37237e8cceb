"""The sources of docs/data.md, taken from the page as they stand there: their examples are those that were written."""

import concurrent.futures
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

import task
from config import Config
from engine.cluster.strategy import create_strategy
from engine.data import load_splits
from pages import blocks, put, sections
from rendering import PROJECT
from rendering import run as run_program

SOURCES = sections("data.md")
COUNTS = {"train": 120, "validation": 40, "test": 40}
Arrays = dict[str, tuple[np.ndarray, np.ndarray]]


@pytest.fixture
def arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Arrays:
    """Returns images (uint8) and labels of each split, and moves to a folder that has an empty folder data/."""
    monkeypatch.chdir(tmp_path)
    os.mkdir("data")
    images, labels = load_digits(return_X_y=True)
    images = (images * 15).astype(np.uint8).reshape(-1, 8, 8, 1)
    ends = np.cumsum([0, *COUNTS.values()])
    return {split: (images[a:b], labels[a:b]) for split, a, b in zip(COUNTS, ends, ends[1:], strict=False)}


@pytest.fixture
def loaded(arrays, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, int]]:
    """Puts the source of a section into the task; returns how many examples it has, which are those of the arrays."""

    def load(title: str, block: int = 0, brightest: float = 255.0) -> dict[str, int]:
        config = Config(global_batch_size=20, simulated_devices=1, run_dir=tmp_path / "runs" / "first")
        monkeypatch.setattr(task, "config", config, raising=False)
        put(blocks(SOURCES[title])[block], task, monkeypatch, tmp_path)
        batches = load_splits(["train", "validation"], task, config, create_strategy(config))
        for name, each in batches.items():
            features, labels, _ = each.element_spec
            assert (features.dtype, features.shape, labels.dtype.is_integer) == (tf.float32, [20, 8, 8, 1], True)
            if each.split in arrays.keys() - {"train"}:
                images, numbers, weights = (np.concatenate(parts) for parts in zip(*each.one_by_one(), strict=True))
                found = np.concatenate([images.reshape(-1, 64) * brightest, numbers[:, None]], axis=1)[weights > 0]
                np.testing.assert_allclose(in_order(found), in_order(rows(arrays, name)), rtol=1e-6)
        return {name: each.number_of_examples for name, each in batches.items()}

    return load


def rows(arrays: Arrays, name: str) -> np.ndarray:
    """Returns the pixels and the label of each image; of "validation/low" those whose label is below 5."""
    split, _, part = name.partition("/")
    images, labels = arrays[split]
    found = np.concatenate([images.reshape(-1, 64), labels[:, None]], axis=1)
    return found[(labels < 5) == (part == "low")] if part else found


def in_order(found: np.ndarray) -> np.ndarray:
    return found[np.lexsort(np.round(found).T)]


def test_arrays_and_several_datasets_of_a_split(arrays, loaded) -> None:
    for split, (images, labels) in arrays.items():
        np.savez(f"data/{split}.npz", images=images.astype(np.float32), labels=labels.astype(np.int32))
    # task.prepare_example is that of the digits.
    assert loaded("Arrays", brightest=16.0) == {"train": 120, "validation": 40}
    assert loaded("Splits", brightest=16.0).keys() == {"train", "validation/low", "validation/high"}


def test_record_files(arrays, loaded) -> None:
    for split in arrays:
        write_records(split, *arrays[split])
    loaded("Record files")
    number, record = list(task.read_inputs(Path("data/test-1.tfrecord")))[3]
    assert number == 3
    example = tf.train.Example.FromString(record)
    del example.features.feature["label"]  # As of an input of predict.py.
    image, _ = task.prepare_example(example.SerializeToString(), training=False, seed=[0, 0])
    np.testing.assert_allclose(image * 255.0, arrays["test"][0][7], rtol=1e-6)


def write_records(split: str, images: np.ndarray, labels: np.ndarray) -> None:
    for part in range(2):
        with tf.io.TFRecordWriter(f"data/{split}-{part}.tfrecord") as writer:
            for image, label in zip(images[part::2], labels[part::2], strict=True):
                example = tf.train.Example()
                example.features.feature["image"].bytes_list.value.append(tf.io.encode_png(image).numpy())
                example.features.feature["label"].int64_list.value.append(label)
                writer.write(example.SerializeToString())


@pytest.mark.long
def test_tensorflow_datasets(arrays, loaded) -> None:
    import tensorflow_datasets as tfds

    features = tfds.features.FeaturesDict(
        {"image": tfds.features.Image(shape=(8, 8, 1)), "label": tfds.features.ClassLabel(num_classes=10)}
    )

    for block, counts in ((1, {"train": 120, "validation": 40}), (0, {"train": 96, "validation": 24})):
        tfds.dataset_builders.store_as_tfds_dataset(
            name="digits",
            version="1.0.0",
            features=features,
            split_datasets={
                split: tf.data.Dataset.from_tensor_slices({"image": images, "label": labels})
                for split, (images, labels) in arrays.items()
            },
            data_dir="data",
        )
        assert loaded("TensorFlow Datasets", block) == counts
        # The other one validates on some of the images to train on, which were shuffled when they were stored.
        arrays.pop("validation", None)
        shutil.rmtree("data/digits")


def test_generator(arrays, loaded) -> None:
    for split in arrays:
        np.savetxt(f"data/{split}.csv", rows(arrays, split), delimiter=",")
    loaded("A generator", brightest=16.0)


def test_images_in_folders(arrays, loaded) -> None:
    for split, (images, labels) in arrays.items():
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            folder = Path("data", split, str(label))
            folder.mkdir(parents=True, exist_ok=True)
            keras.utils.save_img(folder / f"{number}.png", image, scale=False)
    loaded("Images in folders")
    found = list(task.read_inputs(Path("data/test/3")))
    assert [name for name, _ in found] == sorted(path.name for path in Path("data/test/3").iterdir())
    name, path = found[0]
    image, _ = task.prepare_example(tf.constant(path), 0)
    np.testing.assert_allclose(image * 255.0, arrays["test"][0][int(name.removesuffix(".png"))], rtol=1e-6)


def test_tokenized_text(arrays, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with tf.io.TFRecordWriter("data/train.tfrecord") as writer:
        for label, count in enumerate((3, 9, 5, 30, 20, 4, 1, 12)):
            example = tf.train.Example()
            example.features.feature["tokens"].int64_list.value.extend(range(100 * label + 1, 100 * label + 1 + count))
            example.features.feature["label"].int64_list.value.append(label)
            writer.write(example.SerializeToString())
    put(blocks(SOURCES["Tokenized text"])[0], task, monkeypatch, tmp_path)
    config = Config(global_batch_size=4, simulated_devices=1, run_dir=tmp_path / "run", pad_to=(16, 32, 64))
    batches, model = load_splits(["train"], task, config, create_strategy(config))["train"], task.create_model()
    for tokens, labels, _ in batches.one_by_one():
        assert tokens.shape[1] in (16, 32)
        for row, label in zip(tokens.numpy(), labels.numpy(), strict=True):
            assert set(row[row > 0] // 100) == {label}
        np.testing.assert_allclose(model(tokens), model(tf.pad(tokens, [[0, 0], [0, 9]])), rtol=1e-5, atol=1e-6)


def test_one_process_at_a_time_downloads(arrays, loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {}
    for split, (images, labels) in arrays.items():
        parts |= {f"{split}_images": images.astype(np.float32), f"{split}_labels": labels.astype(np.int32)}
    os.mkdir("origin")
    np.savez("origin/digits.npz", **parts)
    there = SOURCES["Several processes"].replace("https://example.org", Path("origin").absolute().as_uri())
    monkeypatch.setitem(SOURCES, "Several processes", there)
    loaded("Several processes", brightest=16.0)
    assert [path.name for path in Path("data").iterdir() if path.suffix == ".npz"] == ["digits.npz"]

    at_once, most = threading.Semaphore(1), []

    def get_file(*_: object, **__: object) -> str:
        most.append(at_once.acquire(blocking=False))
        threading.Event().wait(0.02)
        at_once.release()
        return "data/digits.npz"

    monkeypatch.setattr(keras.utils, "get_file", get_file)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        list(threads.map(task.load_examples, ["train"] * 4))
    assert most == [True] * 4


@pytest.mark.long
def test_command_that_downloads_runs_alone() -> None:
    (command,) = re.findall(r"(?ms)^```\n(.*?)^```", SOURCES["Several processes"])
    command = command.replace("load_examples(split)", "load_examples(split); print(split)")
    done = run_program("bash", "-ec", command, folder=PROJECT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["train", "validation", "test"]
