"""The recipes of docs/steps.md, as they stand there: their losses on one replica, and their results on several."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from step_recipes import (
    BATCH,
    CREATE_OPTIMIZER,
    FITTING,
    RECIPES,
    Apply,
    applier,
    assert_close,
    build,
    take_steps,
    weights,
)

import config
import task
import train
from engine.check.check import check_task


@pytest.fixture
def apply(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Apply:
    return applier(monkeypatch, tmp_path)


def test_every_recipe_is_run() -> None:
    assert {title for title, text in RECIPES.items() if "```python" in text} == FITTING.keys()


# --- What each loss is ------------------------------------------------------------------------------------------------
# Each function takes the examples of a batch, without padding, and returns the loss of the global batch.


def log_softmax(logits: Any) -> np.ndarray:
    logits = np.asarray(logits, "float64")
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def cross_entropy(labels: np.ndarray, logits: Any) -> np.ndarray:
    return -np.take_along_axis(log_softmax(logits), labels[..., None].astype(int), axis=-1)[..., 0]


def noisy_loss(features: Any, labels: np.ndarray) -> float:
    assert len({tuple(seed) for seed in features["seed"]}) == len(labels)
    noise = [tf.random.stateless_normal((8, 8, 1), seed) for seed in features["seed"]]
    return cross_entropy(labels, task.model(features["image"] + 0.1 * np.stack(noise))).sum() / BATCH


def token_loss(features: np.ndarray, labels: np.ndarray) -> float:
    return cross_entropy(labels, task.model(features))[labels != 0].mean()


def box_loss(features: np.ndarray, labels: Any) -> float:
    found = {name: each.numpy().astype("float64") for name, each in task.model(features).items()}
    is_object = labels["is_object"].astype(bool)
    entropy = np.log1p(np.exp(np.where(is_object, -1, 1) * found["is_object"][:, 0]))
    return entropy.sum() / BATCH + np.square(labels["box"] - found["box"])[is_object].mean()


def loss_of_heads(features: np.ndarray, labels: Any) -> float:
    logits = {head: each.numpy()[labels[head] >= 0] for head, each in task.model(features).items()}
    return sum(cross_entropy(labels[head][labels[head] >= 0], each).mean() for head, each in logits.items())


def simclr_loss(features: Any, labels: np.ndarray) -> float:
    """NT-Xent: the views 2 k and 2 k + 1 are those of an example."""
    views = features["views"]
    assert (views[:, 0] != views[:, 1]).any(axis=(1, 2, 3)).sum() > len(views) / 2
    codes = task.model(views.reshape(-1, 8, 8, 1)).numpy().astype("float64")
    codes /= np.linalg.norm(codes, axis=-1, keepdims=True)
    scores = codes @ codes.T / 0.5
    np.fill_diagonal(scores, -1e30)
    return cross_entropy(np.arange(len(codes)) ^ 1, scores).sum() / 2 / BATCH


def clip_loss(features: Any, labels: np.ndarray) -> float:
    image, text = (task.model[name](features[name]).numpy().astype("float64") for name in ("image", "text"))
    scores, places = image @ text.T, np.arange(len(image))
    return (cross_entropy(places, scores).sum() + cross_entropy(places, scores.T).sum()) / 2 / BATCH


def mixup_loss(features: Any, labels: np.ndarray) -> float:
    kept = features["kept"].astype("float64")
    assert kept.std() > 0.2
    if len(kept) < BATCH:  # The last partner is padding.
        kept[-1] = 1.0
    share = kept[:, None, None, None]
    logits = task.model(share * features["image"] + (1 - share) * np.roll(features["image"], -1, axis=0))
    both = kept * cross_entropy(labels, logits) + (1 - kept) * cross_entropy(np.roll(labels, -1), logits)
    return both.sum() / BATCH


def loss_of_student(features: Any, labels: np.ndarray) -> float:
    logits, targets = (task.model[name](features[name]) for name in ("student", "teacher"))
    of_label = cross_entropy(np.maximum(labels, 0), logits) * (labels >= 0)
    of_teacher = np.square(np.exp(log_softmax(logits)) - np.exp(log_softmax(targets))).mean(axis=-1)
    return (of_label + of_teacher).sum() / BATCH


def loss_of_distillation(features: np.ndarray, labels: np.ndarray) -> float:
    logits, wanted = task.model(features).numpy(), task.teacher(features).numpy()
    soft = -(np.exp(log_softmax(wanted / 4)) * log_softmax(logits / 4)).sum(axis=-1)
    return (0.1 * cross_entropy(labels, logits) + 0.9 * 16 * soft).sum() / BATCH


def loss_of_attack(features: np.ndarray, labels: np.ndarray) -> float:
    changed = []
    for image, label in zip(features, labels, strict=True):
        pixels = tf.constant(image[None])
        with tf.GradientTape() as tape:
            tape.watch(pixels)
            one = task.loss_objects["label"](label[None], task.model(pixels))
        changed.append(np.clip(image + 0.05 * np.sign(tape.gradient(one, pixels)[0].numpy()), 0, 1))
    plain, attacked = (cross_entropy(labels, task.model(np.stack(each))) for each in (features, changed))
    assert (attacked > plain).mean() > 0.9
    return attacked.sum() / BATCH


def diffusion_loss(features: Any, labels: np.ndarray) -> float:
    losses = []
    for seed, image in zip(features["seed"], labels, strict=True):
        one, two = tf.unstack(tf.random.split(seed, 2))
        angle = float(tf.random.stateless_uniform([], one, maxval=np.pi / 2))
        noise = tf.random.stateless_normal([8, 8, 1], two).numpy()
        noisy = np.float32(np.cos(angle) * image + np.sin(angle) * noise)
        found = task.model({"image": noisy[None], "angle": np.full([1, 1, 1, 1], angle, "float32")})[0].numpy()
        # The image that it stands for is as far away as the velocity, times the sine.
        losses.append(np.square(found - (np.cos(angle) * noise - np.sin(angle) * image)).mean())
    return np.sum(losses) / BATCH


def plain_loss(features: np.ndarray, labels: np.ndarray) -> float:
    return cross_entropy(labels, task.model(features)).sum() / BATCH


IN_TWO = {"micro_batches": 2}
# The loss, and settings with which one replica gives the same.
LOSSES: dict[str, tuple[Callable[..., float] | None, dict[str, Any]]] = {
    "Random numbers in a step": (noisy_loss, IN_TWO),
    "A mean over tokens": (token_loss, IN_TWO),
    "A term for positives only": (box_loss, IN_TWO),
    "Several heads with missing labels": (loss_of_heads, IN_TWO),
    "Contrastive learning of one encoder (SimCLR)": (simclr_loss, {}),
    "Contrastive learning of two encoders (CLIP)": (clip_loss, {}),
    "Mixup": (mixup_loss, {}),
    "Mean teacher": (loss_of_student, IN_TWO),
    "Distillation from a trained teacher": (loss_of_distillation, IN_TWO),
    "WGAN-GP with five critic updates": (None, {}),
    "Sharpness-aware minimization (SAM)": (None, {}),
    "Updates that are skipped": (plain_loss, {}),
    "Adversarial examples (FGSM)": (loss_of_attack, IN_TWO),
    "Diffusion": (diffusion_loss, IN_TWO),
    "Masked language model": (token_loss, IN_TWO),
    "Layers that are frozen until a step": (plain_loss, IN_TWO),
}
# Of each kind: a sum over the batch, a comparison within it, and a second network.
QUICK = ("A mean over tokens", "Contrastive learning of one encoder (SimCLR)", "Mean teacher")


def without_padding(batch: Any) -> tuple[Any, Any]:
    is_real = batch[2].numpy() > 0
    return tf.nest.map_structure(lambda part: part.numpy()[is_real], batch[:2])


def results_on_one_replica(title: str, settings: dict[str, Any]) -> tuple[list[float], Any, dict[str, float]]:
    """Compares the losses of two steps with the formula; returns them, the weights, and the metrics.

    The second batch has padding. The steps run in Python, which takes a moment, and in micro-batches.
    """
    loss, options = LOSSES[title]
    build(1, keep_last_batch=True, limit_steps=2, eager=True, steps_per_execution=1, **settings, **options)
    batches = [*itertools.islice(train.batches["train"].one_by_one(), 2)]
    before, losses = weights(), []
    for batch, (stack, first, count) in zip(batches, train.batches["train"].iterator().take(2), strict=True):
        expected = loss(*without_padding(batch)) if loss else None
        losses += map(float, train.run_steps["train"](stack, first, count))
        assert loss is None or losses[-1] == pytest.approx(expected, rel=1e-5)
    # Nothing depends on the bias with which a critic ends.
    still = [name for name, value in before.items() if np.array_equal(value, weights()[name])]
    assert not [name for name in still if not name.endswith("bias")]
    return losses, weights(), train.run.objects.results("train") | train.validate()


@pytest.mark.parametrize("title", [title for title, (loss, _) in LOSSES.items() if loss and title not in QUICK])
def test_loss_of_a_recipe_is_that_of_its_formula(title: str, apply: Apply) -> None:
    results_on_one_replica(title, {"learning_rate": 0.01, **apply(title)})


@pytest.mark.parametrize(
    ("title", "replicas"),
    [pytest.param(title, 2, marks=[pytest.mark.long] * (title not in QUICK)) for title in LOSSES]
    + [pytest.param(title, 4, marks=pytest.mark.long) for title in ("A mean over tokens", "Mixup")],
)
def test_recipe_gives_the_same_results_on_several_replicas(title: str, replicas: int, apply: Apply) -> None:
    settings = {"learning_rate": 0.01, **apply(title)}
    build(replicas, keep_last_batch=True, limit_steps=2, **settings)
    found = take_steps(2), weights(), train.run.objects.results("train") | train.validate()
    assert_close(found, results_on_one_replica(title, settings))


# --- What --check says ------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    "title",
    [
        "A mean over tokens",
        "Contrastive learning of one encoder (SimCLR)",
        "WGAN-GP with five critic updates",
        "Sharpness-aware minimization (SAM)",
    ],
)
def test_recipe_passes_all_checks(title: str, apply: Apply, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = apply(title, create_optimizer=CREATE_OPTIMIZER)
    capsys.readouterr()
    check_task(train, task, config.Config(run_dir=tmp_path / "run", **{"global_batch_size": BATCH, **settings}))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith("checks passed."), "\n".join(lines)
    assert any("on one replica and on two" in line for line in lines)
