"""The recipes of docs/series.md, as they stand there: losses by NumPy, one replica and two, --check, and a training."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from step_recipes import BATCH, assert_close, build, take_steps, weights

import config
import predict
import task
import train
from engine.check import check_task
from pages import blocks, put_section, sections, untested

RECIPES = {title: text for title, text in sections("series.md").items() if blocks(text)}
SERIES, HEAT, SOURCES = "Series with gaps", "A heat equation", "Several sources in one step"
MONITORS = {HEAT: "validation/value_loss"}
COUNT = 28  # Two batches, of which the second one has padding.

Apply = Callable[..., dict[str, Any]]


@pytest.fixture
def apply(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Apply:
    """Puts a recipe into place, with `new` instead of the text `old`; returns the settings that it needs."""

    def apply(title: str, old: str = "", new: str = "") -> dict[str, Any]:
        assert old in RECIPES[title]
        put_section(RECIPES[title].replace(old, new) if old else RECIPES[title], monkeypatch, tmp_path)
        return {"monitor": MONITORS.get(title, "validation/loss")}

    return apply


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Takes few examples, from all over a split, and an optimizer that does not hide a gradient that is too large.

    The weights are larger than usual, so that no term of a loss is much smaller than the others.
    """

    def few() -> None:
        load, create = task.load_examples, task.create_model

        def load_examples(split: str) -> tf.data.Dataset | None:
            return None if split == "test" else load(split).shard(len(load(split)) // COUNT, 0).take(COUNT)

        def create_model() -> Any:
            made = create()
            for network in made.values() if isinstance(made, dict) else [made]:
                network.set_weights([2.0 * each for each in network.get_weights()])
            return made

        monkeypatch.setattr(task, "load_examples", load_examples)
        monkeypatch.setattr(task, "create_model", create_model)
        monkeypatch.setattr(task, "create_optimizer", lambda total_steps: keras.optimizers.SGD(0.01))

    return few


def test_every_recipe_is_run() -> None:
    titles = {"Series with gaps", "A heat equation", "Several sources in one step"}
    assert not untested(RECIPES, __file__)
    assert titles == {*RECIPES} == {*FORMULAS} == {*MISTAKES}


# --- What each loss is ------------------------------------------------------------------------------------------------
# Each function takes the examples of a batch, without padding, and returns the loss of the global batch.


def softmax(logits: Any) -> np.ndarray:
    exponents = np.exp(np.asarray(logits, "float64"))
    return exponents / exponents.sum(axis=-1, keepdims=True)


def quantile_loss(features: Any, labels: np.ndarray) -> float:
    forecast, (values, is_there) = task.model(features).numpy().astype("float64"), np.moveaxis(labels, -1, 0)
    assert 0.6 < is_there.mean() < 1.0
    losses = [
        abs(value - each) * (quantile if value > each else 1.0 - quantile)
        for example, value_there in zip(forecast, np.stack([values, is_there], axis=-1), strict=True)
        for day, (value, there) in zip(example, value_there, strict=True)
        for quantile, each in zip((0.1, 0.5, 0.9), day, strict=True)
        if there
    ]
    return float(np.mean(losses))


def heat_loss(features: Any, labels: np.ndarray) -> float:
    """Derivatives are differences of the network, which NumPy computes in float64."""
    arrays = [each.astype("float64") for each in task.model["u"].get_weights()]

    def u(points: np.ndarray) -> np.ndarray:
        for kernel, bias in zip(arrays[:-2:2], arrays[1:-2:2], strict=True):
            points = np.tanh(points @ kernel + bias)
        return (points @ arrays[-2] + arrays[-1])[:, 0]

    inside, (x, t) = features["inside"].astype("float64"), 1e-4 * np.eye(2)
    assert len({tuple(point) for point in inside}) == len(labels)
    u_t = (u(inside + t) - u(inside - t)) / 2e-4
    u_xx = (u(inside + x) - 2.0 * u(inside) + u(inside - x)) / 1e-8
    (((k,),),) = task.model["k"].get_weights()
    return (((u_t - k * u_xx) ** 2).sum() + 10.0 * ((u(features["known"]) - labels) ** 2).sum()) / BATCH


def loss_of_sources(features: np.ndarray, labels: Any) -> float:
    entropy = -np.log(softmax(task.model(features))[np.arange(len(features)), labels["label"]])
    one, other = (softmax(task.model(labels["views"][:, number])) for number in range(2))
    return float(entropy.mean() + 5.0 * ((one - other) ** 2).sum(axis=-1).mean())


FORMULAS = {SERIES: quantile_loss, HEAT: heat_loss, SOURCES: loss_of_sources}


def without_padding(batch: Any) -> tuple[Any, Any]:
    is_real = batch[2].numpy() > 0
    return tf.nest.map_structure(lambda part: part.numpy()[is_real], batch[:2])


def results() -> tuple[Any, ...]:
    return weights(), train.run.objects.results("train"), train.evaluate_split("validation")


@pytest.mark.parametrize("title", RECIPES)
def test_recipe_gives_the_loss_of_its_formula_and_the_same_results_on_two_replicas(
    title: str, apply: Apply, few: Callable[[], None]
) -> None:
    settings = apply(title)
    few()
    build(2, keep_last_batch=True, **settings)
    on_two = take_steps(2), *results()

    # In Python, and in micro-batches.
    build(1, keep_last_batch=True, eager=True, steps_per_execution=1, micro_batches=2, **settings)
    batches, losses = [*itertools.islice(train.batches["train"].one_by_one(), 2)], []
    assert [int(sum(batch[2])) for batch in batches] == [16, 12]
    before = weights()
    for batch, (stack, first, count) in zip(batches, train.batches["train"].iterator().take(2), strict=True):
        expected = FORMULAS[title](*without_padding(batch))
        losses += map(float, train.run_steps["train"](stack, first, count))
        assert losses[-1] == pytest.approx(expected, rel=1e-5)
    assert not [name for name, value in weights().items() if np.array_equal(value, before[name])]
    assert_close(on_two, (losses, *results()), rtol=1e-5)


# --- The data ---------------------------------------------------------------------------------------------------------


def test_windows_forecast_the_days_of_their_split(apply: Apply, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(SERIES)
    # A value is its day, and the tenth day of the first series is missing.
    values = np.tile(np.arange(364, dtype="float32"), [2, 1])
    values[0, 9] = np.nan
    monkeypatch.setattr(task, "read_series", lambda: (values, np.array([[0, 0], [1, 1]], "float32")))
    for split, days in (("train", range(28, 280)), ("validation", range(280, 322)), ("test", range(322, 364))):
        future = []
        for number, (features, labels) in enumerate(task.load_examples(split)):
            joined = np.concatenate([features["past"], labels])
            first = joined[-1] - 34
            assert np.array_equal(joined, values[int(features["known"][0]), int(first) :][:35], equal_nan=True)
            if number == 0 and split == "train":
                filled = task.prepare_example(features, labels)[0]["past"].numpy()
                assert filled[8:11].tolist() == [[8, 1], [0, 0], [10, 1]]
            future += labels.numpy().tolist()
        assert {*future} == {*days}


def test_second_points_differ_in_each_pass_of_training_only(apply: Apply, few: Callable[[], None]) -> None:
    settings = apply(HEAT)
    few()
    build(1, **settings)

    def points(split: str, epoch: int) -> np.ndarray:
        batches = itertools.islice(train.batches[split].one_by_one(epoch), 2)
        return np.concatenate([without_padding(batch)[0]["inside"] for batch in batches])

    assert not np.isin(points("train", 0), points("train", 1)).any()
    np.testing.assert_array_equal(points("validation", 0), points("validation", 1))


def test_each_image_counts_once_in_evaluation(apply: Apply) -> None:
    settings = apply(SOURCES)
    build(2, **settings)
    examples = [*task.load_examples("validation")]
    seen: dict[bytes, list[float]] = {}
    for image, labels in examples:
        seen.setdefault(image.numpy().tobytes(), []).append(float(labels["counts"][0]))
    assert {sum(counts) for counts in seen.values()} == {1.0}
    assert sum(labels["counts"][1].numpy() for _, labels in examples) == len(examples) > 1.9 * len(seen)
    images = np.stack([image / 16.0 for image, labels in examples if labels["counts"][0] > 0])
    correct = np.array([labels["label"] for _, labels in examples if labels["counts"][0] > 0])
    entropy = -np.log(softmax(task.model(images))[np.arange(len(images)), correct])
    assert train.evaluate_split("validation")["validation/loss"] == pytest.approx(entropy.mean(), rel=1e-5)
    assert {tuple(labels["counts"].numpy()) for _, labels in task.load_examples("train")} == {(1.0, 1.0)}


# --- What --check says ------------------------------------------------------------------------------------------------

# A usual mistake in each recipe, and the line of --check that finds it.
MISTAKES = {
    SERIES: (
        "sum_over_batch(count_values)",
        "tf.reduce_sum(value_weights(labels, sample_weights))",
        "compute_loss",
    ),
    HEAT: ("tf.random.stateless_uniform([2], seed)", "tf.random.uniform([2])", "prepare_example"),
    SOURCES: ("sum_over_batch(count_images)", "count_images(features, labels, sample_weights)", "compute_loss"),
}


@pytest.mark.long
@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize("title", RECIPES)
def test_check_finds_the_usual_mistake_and_no_other(
    title: str, is_wrong: bool, apply: Apply, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new, hook = MISTAKES[title]
    settings = apply(title, old, new) if is_wrong else apply(title)
    check_task(train, task, config.Config(run_dir=tmp_path / "run", global_batch_size=BATCH, **settings))
    found = capsys.readouterr().out
    failed = [line for line in found.splitlines() if line.startswith("FAIL")]
    assert any(hook in line for line in failed) if is_wrong else not failed, found
    assert is_wrong or "on one replica and on two" in found


# --- A training -------------------------------------------------------------------------------------------------------


def trained(title: str, folder: Path, *flags: str) -> dict[str, float]:
    """Trains; returns the metrics of the last epoch."""
    run_dir = f"--run-dir={folder}/run"
    train.main([run_dir, f"--monitor={MONITORS.get(title, 'validation/loss')}", "--simulated-devices=1", *flags])
    names, *_, values = (folder / "run/metrics.csv").read_text(encoding="utf-8").splitlines()
    return dict(zip(names.split(","), map(float, values.split(",")), strict=True))


def test_forecast_is_better_than_that_of_known_quantiles(apply: Apply, tmp_path: Path) -> None:
    apply(SERIES)
    found = trained(SERIES, tmp_path, "--epochs=4", "--global-batch-size=64", "--patience=5")
    values = task.read_series()[0][:, 280:322, None]
    errors = values - np.nanquantile(values, task.QUANTILES)
    plain = np.nanmean(np.maximum(task.QUANTILES * errors, (np.array(task.QUANTILES) - 1.0) * errors))
    assert found["validation/loss"] < plain / 3
    assert found["validation/coverage"] == pytest.approx(0.8, abs=0.06)

    # New series of another length.
    values, known = (each[:3] for each in task.read_series())
    np.savez(tmp_path / "new.npz", values=values[:, 100:150], known=known)
    predict.main([str(tmp_path / "run"), str(tmp_path / "new.npz"), f"--output={tmp_path}/found.npz"])
    past = np.stack([np.nan_to_num(values[:, 122:150]), np.isfinite(values[:, 122:150])], axis=-1)
    expected = predict.load(tmp_path / "run").model({"past": past.astype("float32"), "known": known})
    np.testing.assert_allclose(np.load(tmp_path / "found.npz")["quantiles"], expected, atol=1e-5)


@pytest.mark.long
def test_coefficient_of_the_equation_is_found(apply: Apply, tmp_path: Path) -> None:
    apply(HEAT)
    found = trained(HEAT, tmp_path, "--epochs=100")
    assert found["validation/k"] == pytest.approx(0.1, abs=0.005)
    assert found["validation/value_loss"] < 1e-4


@pytest.mark.long
def test_unlabelled_images_help(apply: Apply, tmp_path: Path) -> None:
    found = []
    for name, factor in (("with", "5.0"), ("without", "0.0")):
        apply(SOURCES, "5.0 * means[1]", f"{factor} * means[1]")
        (tmp_path / name).mkdir()
        found.append(trained(SOURCES, tmp_path / name, "--epochs=15"))
    assert found[0]["validation/loss"] < 0.6 * found[1]["validation/loss"]
    assert found[0]["validation/accuracy"] > max(0.94, found[1]["validation/accuracy"])
