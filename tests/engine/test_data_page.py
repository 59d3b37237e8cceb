"""The sources of docs/data.md, taken from the page as they stand there: their examples are those that were written."""

import concurrent.futures
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

import task
import train
from config import Config
from engine.cluster.strategy import create_strategy
from engine.data import Batches, load_splits
from pages import blocks, put, sections
from rendering import PROJECT
from rendering import run as run_program

SOURCES = sections("data.md")
PARTS = ("images", "labels")
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
def loaded(arrays, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Batches]]:
    """Puts the source of a section into the task; returns its batches, whose examples are those of the arrays."""

    def load(title: str, block: int = 0, brightest: float = 255.0) -> dict[str, Batches]:
        config = Config(global_batch_size=20, simulated_devices=1, run_dir=tmp_path / "runs" / "first")
        monkeypatch.setattr(task, "config", config, raising=False)
        put(blocks(SOURCES[title])[block], task, monkeypatch, tmp_path)
        batches = load_splits(train.SPLITS, task, config, create_strategy(config))
        for name, each in batches.items():
            features, labels, _ = each.element_spec
            assert (features.dtype, features.shape, labels.dtype.is_integer) == (tf.float32, [20, 8, 8, 1], True)
            if each.split in arrays.keys() - {"train"}:
                images, numbers, weights = (np.concatenate(parts) for parts in zip(*each.one_by_one(), strict=True))
                found = np.concatenate([images.reshape(-1, 64) * brightest, numbers[:, None]], axis=1)[weights > 0]
                np.testing.assert_allclose(in_order(found), in_order(rows(arrays, name)), rtol=1e-6)
        return batches

    return load


def rows(arrays: Arrays, name: str) -> np.ndarray:
    """Returns the pixels and the label of each image; of "validation/low" those whose label is below 5."""
    split, _, part = name.partition("/")
    images, labels = arrays[split]
    found = np.concatenate([images.reshape(-1, 64), labels[:, None]], axis=1)
    return found[(labels < 5) == (part == "low")] if part else found


def in_order(found: np.ndarray) -> np.ndarray:
    return found[np.lexsort(np.round(found).T)]


def save(arrays: Arrays) -> None:
    for split, (images, labels) in arrays.items():
        np.savez(f"data/{split}.npz", images=images.astype(np.float32), labels=labels.astype(np.int32))


def test_arrays_and_several_datasets_of_a_split(arrays, loaded) -> None:
    save(arrays)
    # task.prepare_example is that of the digits.
    assert list(loaded("Arrays", brightest=16.0)) == ["train", "validation", "test"]
    assert list(loaded("Splits", brightest=16.0)) == ["train", "validation/low", "validation/high"]


def test_record_files(arrays, loaded) -> None:
    for split in arrays:
        write_records(split, *arrays[split])
    loaded("Record files")
    found = list(task.read_inputs(Path("data/test-1.tfrecord")))
    assert [number for number, _ in found] == list(range(20))
    example = tf.train.Example.FromString(found[3][1])
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
@pytest.mark.parametrize("block", [0, 1])
def test_tensorflow_datasets(block: int, arrays, loaded) -> None:
    import tensorflow_datasets as tfds

    features = tfds.features.FeaturesDict(
        {"image": tfds.features.Image(shape=(8, 8, 1)), "label": tfds.features.ClassLabel(num_classes=10)}
    )
    if not block:  # It validates on some of the images to train on, which were shuffled when they were stored.
        del arrays["validation"]
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
    counts = [each.number_of_examples for each in loaded("TensorFlow Datasets", block).values()]
    assert counts == ([120, 40, 40] if block else [96, 24, 40])


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
    name, example = found[0]
    image, _ = task.prepare_example(tf.constant(example), 0)
    np.testing.assert_allclose(image * 255.0, arrays["test"][0][int(name.removesuffix(".png"))], rtol=1e-6)


@pytest.mark.long
def test_tokenised_text(arrays, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    put(blocks(SOURCES["Tokenised text"])[0], task, monkeypatch, tmp_path)
    config = Config(global_batch_size=4, simulated_devices=1, run_dir=tmp_path / "run", pad_to=(16, 32, 64))
    batches = load_splits(train.SPLITS, task, config, create_strategy(config))
    model, lengths = task.create_model(), set()
    for tokens, labels, _ in batches["test"].one_by_one():
        own = np.count_nonzero(tokens, axis=1)
        assert tokens.shape[1] == min(each for each in (16, 32, 64) if each >= max(own))
        assert all(np.all(row[:count] // 100 == label) for row, count, label in zip(tokens, own, labels, strict=True))
        np.testing.assert_allclose(model(tokens), model(tf.pad(tokens, [[0, 0], [0, 9]])), rtol=1e-5, atol=1e-6)
        lengths.add(tokens.shape[1])
    assert len(lengths) > 1


def test_one_process_at_a_time_downloads(arrays, loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {f"{split}_{name}": part for split, pair in arrays.items() for name, part in zip(PARTS, pair, strict=True)}
    os.mkdir("origin")
    np.savez(
        "origin/digits.npz",
        **{name: part.astype(np.float32 if "images" in name else np.int32) for name, part in parts.items()},
    )
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


MEASURE = """
import ctypes, pathlib, sys
import tensorflow as tf
from engine.data import Records

def resident(peak=False):
    ctypes.CDLL(None).malloc_trim(0)
    lines = dict(line.split(":") for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM" if peak else "VmRSS"].split()[0]) * 1024

folder, count = pathlib.Path(sys.argv[1]), 4_000_000
if not (folder / "many").exists():
    with tf.io.TFRecordWriter(str(folder / "one")) as file:
        file.write(b"text")
    (folder / "many").write_bytes((folder / "one").read_bytes() * count)
Records(folder / "one").examples("", 2**29)
pathlib.Path("/proc/self/clear_refs").write_text("5")  # The peak begins here.
before = resident()
examples = Records(folder / "many").examples("", 2**29)
print((resident() - before) / count, (resident(peak=True) - before) / count)
"""


@pytest.mark.long
def test_index_takes_the_memory_that_the_page_says(tmp_path: Path) -> None:
    line = r"(\d+) bytes per (\d+) KiB of the files, at most \d+ MB, in each process; (\d+) bytes per record while"
    ((bytes_kept, kib, made),) = re.findall(line, SOURCES["Memory"])
    assert f"takes {made} bytes per record of" in " ".join(SOURCES["Many records"].split())
    for is_made in (True, False):  # The first program makes the index; the second one reads it, as most starts do.
        done = run_program("python", "-c", MEASURE, tmp_path, folder=PROJECT)
        assert done.returncode == 0, done.stderr
        kept, peak = map(float, done.stdout.split()[-2:])
        assert kept < 2.5  # Of 20 bytes in the file; the heap keeps some megabytes.
        assert peak < (int(made) + 3 if is_made else 3)
    # The first line of the cache is its head, and a point takes so many bytes for each distance.
    size, points = os.path.getsize(tmp_path / "many"), os.path.getsize(tmp_path / ".many.index")
    assert abs(points - size / int(kib) / 1024 * int(bytes_kept)) < 1000
