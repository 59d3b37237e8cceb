"""Jobs from elsewhere, ported with task.py and config.py alone: puts them, and data for them, into a rendered project.

python ports.py NAME FOLDER      the port NAME, on the unrendered project, into a new FOLDER
"""

import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from rendering import PROJECT, TASKS

SPLITS = {"train": 360, "validation": 40, "test": 50}


def place(name: str, project: Path) -> None:
    """Makes a rendered project the port `name`: its task.py, its settings in config.py, its data in `data`."""
    shutil.copy(TASKS / name / "task.py", project / "task.py")
    (project / "tests/test_task.py").unlink()  # What is special to the task that it replaces.
    settings = (TASKS / name / "settings.py").read_text(encoding="utf-8").split("class Config:\n")[1]
    path = project / "config.py"
    code = path.read_text(encoding="utf-8")
    code = code.replace("import dataclasses\n", "import dataclasses\nfrom pathlib import Path\n")
    before, todo, after = code.partition("    # TODO(you): Add the settings of your task")
    rest_of_line, _, after = after.partition("\n")
    path.write_text(f"{before}{todo}{rest_of_line}\n{settings}{after}", encoding="utf-8")
    (project / "data").mkdir()
    WRITE_DATA[name](project / "data")


def write_clothes(folder: Path) -> None:
    """fashion_mnist.npz: each of ten kinds has bright squares of its own, under noise."""
    random = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", SPLITS["train"] + SPLITS["validation"]), ("test", SPLITS["test"])):
        labels = random.integers(0, 10, count, np.uint8)
        kinds = np.random.default_rng(1).integers(0, 2, (10, 7, 7)).repeat(4, axis=1).repeat(4, axis=2)
        images = kinds[labels] * 120.0 + random.uniform(0, 130, (count, 28, 28))
        arrays |= {f"{part}_images": images.astype("uint8"), f"{part}_labels": labels}
    np.savez(folder / "fashion_mnist.npz", **arrays)


def write_sentences(folder: Path) -> None:
    """Record files of pairs of sentences that are equal, or of which the second has other words."""
    import tensorflow as tf

    random = np.random.default_rng(0)
    for split, count in SPLITS.items():
        with tf.io.TFRecordWriter(str(folder / f"{split}.tfrecord")) as file:
            for _ in range(count):
                label, words = int(random.integers(2)), random.integers(4, 60, 5)
                others = words if label else random.integers(4, 60, 5)
                tokens = [2, *words, 3, *others, 3]  # [CLS] one [SEP] other [SEP]
                padding = [0] * (16 - len(tokens))
                fields = {
                    "input_ids": [*tokens, *padding],
                    "input_mask": [1] * len(tokens) + padding,
                    "segment_ids": [0] * 7 + [1] * 6 + padding,
                    "label_ids": [label],
                }
                features = {
                    name: tf.train.Feature(int64_list=tf.train.Int64List(value=values))
                    for name, values in fields.items()
                }
                file.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


def write_masks(folder: Path) -> None:
    """PNG files: noise with a disc and a rectangle, which are classes 1 and 2 of the mask."""
    import tensorflow as tf

    random = np.random.default_rng(0)
    rows, columns = np.mgrid[:32, :32]
    for split, count in SPLITS.items():
        (folder / split).mkdir()
        for number in range(count):
            (y, x), (top, left) = random.integers(6, 26, 2), random.integers(0, 24, 2)
            mask = np.zeros((32, 32, 1), np.uint8)
            mask[(rows - y) ** 2 + (columns - x) ** 2 < 30] = 1
            mask[top : top + 8, left : left + 8] = 2
            colours = np.array([[90, 90, 90], [170, 90, 60], [60, 90, 170]])
            image = colours[mask[..., 0]] + random.normal(0, 40, (32, 32, 3))
            for kind, pixels in (("image", image.clip(0, 255).astype("uint8")), ("mask", mask)):
                tf.io.write_file(str(folder / split / f"{kind}_{number:03}.png"), tf.io.encode_png(pixels))


def numbers_in_order(port: ModuleType, settings: Any) -> list[list[int]]:
    """Returns the numbers of the training examples that each epoch of our input takes, in its order.

    `port` is a task whose load_examples gives (features, labels). Other loops are given this order and nothing else.
    """
    from engine.cluster.strategy import create_strategy
    from engine.data import load_splits

    def load_numbered(split: str) -> Any:
        # With the examples themselves, because what fits in memory is shuffled in another order.
        return port.load_examples(split).enumerate().map(lambda number, example: ((number, example[0]), example[1]))

    hooks = SimpleNamespace(load_examples=load_numbered, prepare_example=lambda features, labels: (features[0], 0))
    batches = load_splits(["train"], hooks, settings, create_strategy(settings))["train"]
    epochs = []
    for epoch in range(settings.epochs):
        numbers, _, weights = (np.concatenate(part) for part in zip(*batches.one_by_one(epoch), strict=True))
        epochs.append(numbers[weights > 0].tolist())
        # No example comes twice, and only those that fill no batch are missing.
        assert set(epochs[-1]) <= set(range(batches.number_of_examples))
        assert len(set(epochs[-1])) == len(epochs[-1]) == batches.number_of_examples - batches.dropped
    assert epochs[0] != epochs[1]
    return epochs


WRITE_DATA = {"tutorial_cnn": write_clothes, "bert": write_sentences, "unet": write_masks}

if __name__ == "__main__":
    name, folder = sys.argv[1], Path(sys.argv[2])
    shutil.copytree(PROJECT, folder, ignore=shutil.ignore_patterns("__pycache__", "runs", "pyproject.toml"))
    place(name, folder)
