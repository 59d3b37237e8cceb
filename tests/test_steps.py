"""Recipes of losses.md and gradients.md: two workers train as one process does, and a killed run ends bit-equal."""

from pathlib import Path

import clusters
import numpy as np
import pytest
from clusters import outcome, weights, workers
from processes import until

from pages import blocks, sections

RECIPES = sections("losses.md") | sections("gradients.md")

# Appended to task.py, before a recipe.
SMALL = """

_load_examples = load_examples


def load_examples(split: str) -> tf.data.Dataset | None:
    return None if split == "test" else _load_examples(split).take(120)


def create_model() -> keras.Model:
    layers = [keras.layers.Flatten(), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def create_optimizer(total_steps: int) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9)

"""
# Ids of a table, of which a step looks up a few rows.
TABLE = """

def create_model() -> keras.Model:
    layers = [keras.layers.Embedding(5000, 4), keras.layers.Flatten(), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((64,), dtype="int64"), *layers])


def prepare_example(features, labels):
    return tf.cast(tf.reshape(features, [64]), tf.int64) + 17 * tf.range(64, dtype=tf.int64), labels


def create_optimizer(total_steps: int) -> keras.optimizers.Optimizer:
    return keras.optimizers.Adagrad(0.05, initial_accumulator_value=1e-4)

"""
WEIGHTS = r".*/(kernel|bias|embeddings)"  # The names of the weights of these models.
FLAGS = ("--epochs=2", "--global-batch-size=20", "--steps-per-execution=1", "--learning-rate=0.01")
CASES = {
    "Contrastive learning of one encoder (SimCLR)": ("", "--keep-last-batch"),
    # Few steps, because five updates in each make rounding grow five times as fast.
    "WGAN-GP with five critic updates": (
        "",
        "--limit-steps=2",
        "--monitor=validation/distance",
        "--monitor-direction=min",
    ),
    "a table that is updated by row": (TABLE, "--micro-batches=2", "--global-clipnorm=0.5"),
}
# One with two optimizers, one with rows.
KILLED = ("WGAN-GP with five critic updates", "a table that is updated by row")


@pytest.mark.long
@pytest.mark.parametrize("title", CASES)
def test_recipe_is_the_same_on_two_workers_and_after_a_kill(title: str, tmp_path: Path) -> None:
    more, *flags = CASES[title]
    project = clusters.project_with(tmp_path, "\n\n".join([SMALL, more, *blocks(RECIPES.get(title, ""))]))
    whole, killed, two = (tmp_path / name for name in ("whole", "killed", "two"))
    clusters.train(project, whole, 1, *FLAGS, *flags)
    clusters.train(project, two, 2, *FLAGS, *flags)

    for row, other in zip(outcome(whole)[0], outcome(two)[0], strict=True):
        np.testing.assert_allclose([*map(float, other.values())], [*map(float, row.values())], rtol=1e-5)
    found = weights(two, WEIGHTS)
    for name, value in weights(whole, WEIGHTS).items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-5 * np.abs(value).max(), err_msg=name)

    if title not in KILLED:
        return
    with workers(project, tmp_path / "logs", 1, f"--run-dir={killed}", *FLAGS, *flags) as (alone,):
        until(lambda: list(killed.glob("checkpoints/step-*/progress.json")))
        alone.process.kill()
    clusters.train(project, killed, 1, *FLAGS, *flags)
    (rows, result), (rows_of_killed, result_of_killed) = outcome(whole), outcome(killed)
    assert rows_of_killed == rows
    assert result_of_killed["weights_sha256"] == result["weights_sha256"]
