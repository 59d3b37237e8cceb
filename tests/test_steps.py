"""The recipes of docs/steps.md in a rendered project: two workers train as one process does."""

import json
from pathlib import Path

import clusters
import numpy as np
import pytest
from clusters import outcome, weights
from pages import blocks, sections

RECIPES = sections("steps.md")
# Random numbers are in other recipes too.
WITH_CODE = [title for title, text in RECIPES.items() if blocks(text)]

SMALL = """

_load_examples, _create_model = load_examples, create_model


def load_examples(split: str) -> tf.data.Dataset | None:
    return None if split == "test" else _load_examples(split).take(120)


def create_model() -> keras.Model:
    layers = [keras.layers.Flatten(), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def create_optimizer(total_steps: int) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1)

"""
FLAGS = ("--epochs=1", "--limit-steps=5", "--global-batch-size=16", "--checkpoint-every-steps=3")


@pytest.mark.long
@pytest.mark.parametrize("title", WITH_CODE)
def test_two_workers_train_as_one_process(title: str, tmp_path: Path) -> None:
    project = clusters.project_with(tmp_path, SMALL)
    for block in blocks(RECIPES[title]):
        with (project / ("config.py" if "class Config" in block else "task.py")).open("a", encoding="utf-8") as file:
            file.write(f"\n{block}")
    flags = (*FLAGS, *prepared(title, project))
    clusters.train(project, tmp_path / "one", 1, *flags)
    clusters.train(project, tmp_path / "two", 2, *flags)
    (rows, _), (others, _) = outcome(tmp_path / "one"), outcome(tmp_path / "two")
    for row, other in zip(rows, others, strict=True):
        np.testing.assert_allclose([*map(float, other.values())], [*map(float, row.values())], rtol=1e-5)
    for name, value in weights(tmp_path / "one").items():
        largest = np.abs(value).max()
        np.testing.assert_allclose(
            weights(tmp_path / "two")[name], value, rtol=0, atol=1e-5 * largest, err_msg=name
        )
