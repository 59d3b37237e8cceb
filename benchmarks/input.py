"""Measures the input pipelines of record files: examples/s, memory, first batches, bytes, and how well is shuffled.

    python benchmarks/input.py [--rounds 3] [--folder build/benchmarks/input]

It writes 2.3 GB of TFRecord files into --folder, once: JPEGs of about 100 KB, records of 1 KB, both sorted by class.
Then it measures, in turns and in processes of their own,
    guide      the pipeline of TensorFlow's guide: files in random order, interleaved, shuffle(10,000), map, batch
    records    load_examples returns Records: read in random order by their offsets
    streamed   load_examples returns a tf.data.TFRecordDataset, shuffled through a buffer
"""

import argparse
import io
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "{{cookiecutter.project_slug}}"))

FILES = 8
CLASSES = 10
BATCH_SIZE = 64
# How many there are, and how many examples to take before and while the clock runs.
SETS = {"jpeg": (20_000, 1_024, 4_096), "small": (300_000, 20_000, 200_000)}
WAYS = ("guide", "records", "streamed")
IMAGE_SIZE = 224


# --- Data -------------------------------------------------------------------------------------------------------------


def write_files(folder: Path) -> None:
    """Writes the record files of each set, sorted by class, unless they are there."""
    import tensorflow as tf

    for name, (count, _, _) in SETS.items():
        if (folder / f"{name}.whole").exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        contents = jpegs() if name == "jpeg" else [np.random.default_rng(0).bytes(900)]
        numbers = np.array_split(np.arange(count), FILES)
        for file, of_file in enumerate(numbers):
            with tf.io.TFRecordWriter(str(folder / f"{name}-{file:05}-of-{FILES:05}.tfrecord")) as writer:
                for number in of_file:
                    writer.write(serialized(contents[number % len(contents)], number * CLASSES // count, number))
        (folder / f"{name}.whole").touch()


def jpegs() -> list[bytes]:
    """Returns JPEGs of 500 x 400 pixels, of about 100 KB each."""
    from PIL import Image

    random, found = np.random.default_rng(0), []
    for _ in range(50):
        coarse = Image.fromarray(random.integers(0, 256, (100, 125, 3), np.uint8)).resize((500, 400))
        noisy = np.clip(np.asarray(coarse) + random.normal(0, 9, (400, 500, 3)), 0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(noisy).save(file, "JPEG", quality=88)
        found.append(file.getvalue())
    return found


def serialized(content: bytes, label: int, number: int) -> bytes:
    import tensorflow as tf

    def integer(value: int) -> tf.train.Feature:
        return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))

    fields = {
        "content": tf.train.Feature(bytes_list=tf.train.BytesList(value=[content])),
        "label": integer(int(label)),
        "number": integer(int(number)),
    }
    return tf.train.Example(features=tf.train.Features(feature=fields)).SerializeToString()


# --- The pipelines ----------------------------------------------------------------------------------------------------


def parse(record: Any) -> tuple[Any, Any]:
    import tensorflow as tf

    fields = {"content": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}
    parsed = tf.io.parse_single_example(record, fields)
    return parsed["content"], parsed["label"]


def prepare_jpeg(record: Any, *, seed: Any) -> tuple[Any, Any]:
    """Decodes and augments an image."""
    import tensorflow as tf

    content, label = parse(record)
    image = tf.image.decode_jpeg(content, channels=3)
    image = tf.image.stateless_random_crop(image, [IMAGE_SIZE, IMAGE_SIZE, 3], seed)
    image = tf.image.stateless_random_flip_left_right(image, seed)
    return tf.cast(image, tf.float32) / 255.0, label


def prepare_small(record: Any) -> tuple[Any, Any]:
    """Makes a vector of the bytes."""
    import tensorflow as tf

    content, label = parse(record)
    return tf.cast(tf.reshape(tf.io.decode_raw(content, tf.uint8), [900]), tf.float32), label


def guide(folder: Path, name: str) -> Iterator[Any]:
    """Yields batches as the tf.data guide and its page on performance have it; labels come second."""
    import tensorflow as tf

    seeds = tf.data.Dataset.random(seed=0).batch(2)
    files = tf.data.Dataset.list_files(str(folder / f"{name}-*.tfrecord"), shuffle=True, seed=0)
    records = files.interleave(tf.data.TFRecordDataset, num_parallel_calls=tf.data.AUTOTUNE).shuffle(10_000, seed=0)
    if name == "jpeg":
        examples = tf.data.Dataset.zip(records, seeds).map(
            lambda record, seed: prepare_jpeg(record, seed=seed), num_parallel_calls=tf.data.AUTOTUNE
        )
    else:
        examples = records.map(prepare_small, num_parallel_calls=tf.data.AUTOTUNE)
    return iter(examples.repeat().batch(BATCH_SIZE, drop_remainder=True).prefetch(tf.data.AUTOTUNE))


def batches(folder: Path, name: str, way: str, *, replicas: int = 1, pipelines: int = 1) -> Any:
    """Returns the project's batches of one of `pipelines` processes."""
    import tensorflow as tf

    from config import Config
    from engine.cluster.strategy import create_strategy
    from engine.data import Records, load_splits

    def streamed(_: str) -> tf.data.Dataset:
        files = sorted(str(path) for path in folder.glob(f"{name}-*.tfrecord"))
        return tf.data.TFRecordDataset(files).apply(tf.data.experimental.assert_cardinality(SETS[name][0]))

    settings = Config(global_batch_size=BATCH_SIZE, simulated_devices=replicas if replicas > 1 else 0)
    task = SimpleNamespace(
        load_examples=streamed if way == "streamed" else lambda _: Records(str(folder / f"{name}-*.tfrecord")),
        prepare_example={"jpeg": prepare_jpeg, "small": prepare_small}[name],
    )
    workers = SimpleNamespace(count=pipelines, index=0)
    return load_splits(["train"], task, settings, create_strategy(settings), workers)["train"]


def taken(folder: Path, name: str, way: str) -> Iterator[Any]:
    """Yields batches, pass after pass."""
    if way == "guide":
        yield from guide(folder, name)
    feed = batches(folder, name, way).iterator()
    while True:
        yield from feed.take(1)


# --- What is measured, each in a process of its own -------------------------------------------------------------------


def measure_rate(folder: Path, name: str, way: str) -> dict[str, float]:
    """Returns the examples per second, and the memory that they took beyond that of importing TensorFlow."""
    import tensorflow as tf

    tf.constant(0)
    before = memory("VmRSS")
    stream = taken(folder, name, way)
    _, warm_up, count = SETS[name]
    for _ in range(warm_up // BATCH_SIZE):
        next(stream)
    started = time.perf_counter()
    for _ in range(count // BATCH_SIZE):
        next(stream)
    rate = count / (time.perf_counter() - started)
    return {"examples/s": rate, "peak MiB": memory("VmHWM") - before}


def measure_first_batch(folder: Path, name: str, way: str, position: float) -> dict[str, float]:
    """Returns what the first batch at a position (0 to 1) of an epoch costs."""
    found = batches(folder, name, way)  # Records are indexed here, once.
    before, started = bytes_read(), time.perf_counter()
    next(found.iterator(first_step=int(position * found.steps_per_pass)).take(1))
    return {"seconds": time.perf_counter() - started, "MB read": (bytes_read() - before) / 1e6}


def measure_share(folder: Path, name: str, way: str, workers: int) -> dict[str, float]:
    """Returns the bytes that one of several workers reads in an epoch."""
    import tensorflow as tf

    found = batches(folder, name, way, replicas=workers, pipelines=workers)
    before, zero = bytes_read(), tf.constant(0, tf.int64)
    for _ in found._pass(zero, zero):
        pass
    return {"MB read": (bytes_read() - before) / 1e6}


def measure_spread(folder: Path, name: str, way: str) -> dict[str, float]:
    """Returns the standard deviation of a class's count in a batch, over the batches of an epoch."""
    if way == "perfect":
        labels = np.random.default_rng(0).permutation(np.arange(SETS[name][0]) * CLASSES // SETS[name][0])
        rows = labels[: len(labels) // BATCH_SIZE * BATCH_SIZE].reshape(-1, BATCH_SIZE)
    elif way == "guide":
        stream = guide(folder, name)
        rows = [next(stream)[1].numpy() for _ in range(SETS[name][0] // BATCH_SIZE)]
    else:
        rows = [labels.numpy() for _, labels, _ in batches(folder, name, way).one_by_one()]
    counts = np.stack([np.bincount(row, minlength=CLASSES) for row in rows])
    return {"deviation": float(counts.std(axis=0).mean())}


MEASURES: dict[str, Callable[..., dict[str, float]]] = {
    "rate": measure_rate,
    "first_batch": measure_first_batch,
    "share": measure_share,
    "spread": measure_spread,
}


def memory(field: str) -> float:
    """Returns a field of /proc/self/status in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith(field)]
    return int(line.split()[1]) / 1024


def bytes_read() -> int:
    """Returns how many bytes this process has read, from memory or from the disk."""
    return int(Path("/proc/self/io").read_text(encoding="utf-8").split()[1])


def measure(folder: Path, what: str, *arguments: Any) -> dict[str, float]:
    """Runs one measurement in a process of its own."""
    command = [sys.executable, __file__, "--folder", folder, "--measure", what, *arguments]
    ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{what} {arguments} failed:\n{ended.stderr[-3000:]}")
    return json.loads(ended.stdout.splitlines()[-1])


def medians(folder: Path, what: str, cases: list[tuple[Any, ...]], rounds: int) -> None:
    """Measures each case in turns; prints the medians."""
    found: dict[tuple[Any, ...], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            found[case].append(measure(folder, what, *case))
    for case, rows in found.items():
        figures = (f"{statistics.median(row[name] for row in rows):,.2f} {name}" for name in rows[0])
        print(f"{what}  {'  '.join(map(str, case))}  {'  '.join(figures)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("build/benchmarks/input"))
    parser.add_argument("--only", nargs="*", default=list(MEASURES), choices=list(MEASURES))
    parser.add_argument("--measure", nargs="+", help="measure in this process: used for the rounds")
    options = parser.parse_args()
    if options.measure:
        what, name, way, *numbers = options.measure
        print(json.dumps(MEASURES[what](options.folder, name, way, *map(json.loads, numbers))))
        return
    write_files(options.folder)
    cases: dict[str, list[tuple[Any, ...]]] = {
        "rate": [(name, way) for name in SETS for way in WAYS],
        "first_batch": [("jpeg", way, position) for way in WAYS[1:] for position in (0.0, 0.5, 0.9)],
        "share": [("small", "records", workers) for workers in (1, 2, 4)],
        "spread": [("small", way) for way in ("perfect", *WAYS)],
    }
    for what in options.only:
        medians(options.folder, what, cases[what], 1 if what in ("share", "spread") else options.rounds)


if __name__ == "__main__":
    main()
