"""The recipes of losses.md, gradients.md and reproducibility.md: losses on one replica, results on several."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from step_recipes import (
    BATCH,
    CREATE_OPTIMIZER,
    RECIPES,
    Apply,
    applier,
    assert_close,
    build,
    small_model,
    take_steps,
    weights,
)

import config
import task
import train
from engine.check import check_task
from engine.errors import BadInput
from engine.run.initial_weights import load_initial_weights


@pytest.fixture
def apply(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Apply:
    return applier(monkeypatch, tmp_path)


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


FORMULAS: dict[str, Callable[..., float] | None] = {
    "Random numbers in a step": noisy_loss,
    "A mean over tokens": token_loss,
    "A term for positives only": box_loss,
    "Several heads with missing labels": loss_of_heads,
    "Contrastive learning of one encoder (SimCLR)": simclr_loss,
    "Contrastive learning of two encoders (CLIP)": clip_loss,
    "Mixup": mixup_loss,
    "Mean teacher": loss_of_student,
    "Distillation from a trained teacher": loss_of_distillation,
    "WGAN-GP with five critic updates": None,  # Tests of their own compare these two.
    "Sharpness-aware minimization (SAM)": None,
    "Updates that are skipped": plain_loss,
    "Adversarial examples (FGSM)": loss_of_attack,
    "Diffusion": diffusion_loss,
    "Masked language model": token_loss,
    "Layers that are frozen until a step": plain_loss,
}
# They need the complete batch at once.
WHOLE = ("SimCLR", "CLIP", "Mixup", "WGAN-GP", "SAM", "skipped")
# A sum over the batch, and a comparison within it.
QUICK = ("A mean over tokens", "Contrastive learning of one encoder (SimCLR)")


def without_padding(batch: Any) -> tuple[Any, Any]:
    is_real = batch[2].numpy() > 0
    return tf.nest.map_structure(lambda part: part.numpy()[is_real], batch[:2])


def results_on_one_replica(title: str, settings: dict[str, Any]) -> tuple[list[float], Any, dict[str, float]]:
    """Compares the losses of two steps with the formula; returns them, the weights, and the metrics.

    The second batch has padding. The steps run in Python, which takes a moment, and in micro-batches.
    """
    formula, parts = FORMULAS[title], 1 if any(name in title for name in WHOLE) else 2
    build(1, keep_last_batch=True, limit_steps=2, eager=True, steps_per_execution=1, micro_batches=parts, **settings)
    batches = [*itertools.islice(train.batches["train"].one_by_one(), 2)]
    before, losses = weights(), []
    for batch, (stack, first, count) in zip(batches, train.batches["train"].iterator().take(2), strict=True):
        expected = formula(*without_padding(batch)) if formula else None
        losses += map(float, train.run_steps["train"](stack, first, count))
        assert formula is None or losses[-1] == pytest.approx(expected, rel=1e-5)
    # Nothing depends on the bias with which a critic ends.
    still = [name for name, value in before.items() if np.array_equal(value, weights()[name])]
    assert not [name for name in still if not name.endswith("bias")]
    return losses, weights(), train.run.objects.results("train") | train.evaluate_split("validation")


@pytest.mark.parametrize(
    ("title", "replicas"),
    [pytest.param(title, 2, marks=[pytest.mark.long] * (title not in QUICK)) for title in RECIPES]
    + [pytest.param(title, 4, marks=pytest.mark.long) for title in ("A mean over tokens", "Mixup")],
)
def test_recipe_gives_the_loss_of_its_formula_and_the_same_results_on_several_replicas(
    title: str, replicas: int, apply: Apply
) -> None:
    settings = {"learning_rate": 0.01, **apply(title)}
    build(replicas, keep_last_batch=True, limit_steps=2, **settings)
    found = take_steps(2), weights(), train.run.objects.results("train") | train.evaluate_split("validation")
    assert_close(found, results_on_one_replica(title, settings))


# --- Updates ----------------------------------------------------------------------------------------------------------


def test_recipes_refuse_what_they_cannot_do(apply: Apply) -> None:
    for title, settings, reason in (
        ("Sharpness-aware minimization (SAM)", {"micro_batches": 2}, "SAM is not for --micro-batches"),
        ("WGAN-GP with five critic updates", {"global_batch_size": 16}, "must be a multiple of 5"),
    ):
        build(1, eager=True, **{**apply(title), **settings})
        with pytest.raises(ValueError, match=reason):
            take_steps(1)


@pytest.mark.long
def test_critic_is_updated_five_times(apply: Apply) -> None:
    """The same in a plain loop, of fifths of the batches."""
    settings = apply("WGAN-GP with five critic updates")
    build(1, learning_rate=1e-3, **settings)
    take_steps(3)
    found = weights()
    build(1, learning_rate=1e-3, **settings)
    critic, generator = task.model["critic"], task.model["generator"]

    def update(name: str, tape: tf.GradientTape, loss: tf.Tensor) -> None:
        variables = task.model[name].trainable_variables
        task.optimizer[name].apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    for features, images, _ in itertools.islice(train.batches["train"].one_by_one(), 3):
        for part in range(5):
            noise, mix, real = features["noise"][part::5], features["mix"][part::5], images[part::5]
            with tf.GradientTape() as tape:
                made = tf.stop_gradient(generator(noise))
                between = tf.constant(mix.numpy() * real.numpy() + (1 - mix.numpy()) * made.numpy())
                with tf.GradientTape() as inner:
                    inner.watch(between)
                    scores = critic(between)
                slopes = tf.norm(tf.reshape(inner.gradient(scores, between), [8, -1]), axis=1)
                loss = tf.reduce_mean(critic(made) - critic(real)) + 10.0 * tf.reduce_mean((slopes - 1.0) ** 2)
            update("critic", tape, loss)
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(critic(generator(features["noise"])))
        update("generator", tape, loss)
    assert_close(weights(), found, rtol=1e-4)


@pytest.mark.long
def test_sam_updates_by_the_gradient_at_the_moved_weights(apply: Apply) -> None:
    apply("Sharpness-aware minimization (SAM)")
    build(4, limit_steps=1)
    features, labels, _ = next(train.batches["train"].one_by_one())
    features, labels = (
        tf.concat(train.strategy.experimental_local_results(each), axis=0) for each in (features, labels)
    )

    def gradients() -> list[np.ndarray]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(task.loss_objects["label"](labels, task.model(features)))
        return [each.numpy() for each in tape.gradient(loss, task.model.trainable_variables)]

    before, first = task.model.get_weights(), gradients()
    norm = np.sqrt(sum(np.square(each).sum() for each in first))
    task.model.set_weights([each + 0.05 / norm * gradient for each, gradient in zip(before, first, strict=True)])
    expected = [each - 0.5 * gradient for each, gradient in zip(before, gradients(), strict=True)]
    task.model.set_weights(before)
    take_steps(1)
    assert_close(task.model.get_weights(), expected)


@pytest.mark.long
def test_large_gradients_change_nothing(apply: Apply, monkeypatch: pytest.MonkeyPatch) -> None:
    apply("Updates that are skipped", create_optimizer=lambda total_steps: keras.optimizers.AdamW(0.01, epsilon=1e-5))
    monkeypatch.setattr(task, "LARGEST_NORM", 1e-9)
    build(2)
    kept = [*task.model.trainable_variables, *task.optimizer.variables]
    before = [each.numpy() for each in kept]
    take_steps(1)
    for variable, value in zip(kept, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


@pytest.mark.long
def test_encoder_starts_at_its_step(apply: Apply) -> None:
    apply("Layers that are frozen until a step")
    # Two steps an epoch; of six steps the first two are without the encoder.
    build(2, epochs=3, learning_rate=0.1, keep_last_batch=True)
    before = weights()
    kernel = next(name for name in before if "conv2d/kernel" in name)
    take_steps(2)
    np.testing.assert_array_equal(weights()[kernel], before[kernel])
    take_steps(1, epoch=1)
    # A tenth of the rate of the head; Adam's first step is as long as the rate, later ones are shorter.
    assert 0.001 < np.abs(weights()[kernel] - before[kernel]).max() < 0.011


def test_frozen_teacher_is_not_averaged_and_evaluated_as_it_is(apply: Apply) -> None:
    apply("Mean teacher")

    def create_model() -> dict[str, keras.Model]:
        models = {name: small_model() for name in ("student", "teacher")}
        for each in models.values():
            each.add(keras.layers.BatchNormalization(synchronized=True))
        models["teacher"].trainable = False
        return models

    task.create_model = create_model
    build(1, ema_decay=0.5, eager=True)
    assert {name.split("/")[0] for name in train.objects.average.averages} == {"student"}
    take_steps(1)
    last = task.model["teacher"].get_weights()
    with train.run.evaluation_weights():
        for value, expected in zip(task.model["teacher"].get_weights(), last, strict=True):
            np.testing.assert_array_equal(value, expected)


def test_networks_start_with_those_of_a_run_and_not_with_a_file_of_one(apply: Apply, tmp_path: Path) -> None:
    apply("Mean teacher")
    build(1, run_dir=tmp_path)
    train.run.best.save(1, {})
    train.run.best.writer.wait()
    expected = weights()
    for network in task.model.values():
        network.set_weights([np.zeros_like(each) for each in network.get_weights()])
    assert load_initial_weights(tmp_path, task.model, partial=False).startswith("8 of the model's 8 variables from")
    for name, value in weights().items():
        np.testing.assert_array_equal(value, expected[name])
    task.model["student"].save(tmp_path / "student.keras")
    with pytest.raises(BadInput, match="contains one model, and the task has student, teacher"):
        load_initial_weights(tmp_path / "student.keras", task.model, partial=False)


# --- Generation -------------------------------------------------------------------------------------------------------


def test_known_velocity_leads_to_the_image(apply: Apply, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All images are one: then the velocity is known, and every sample is that image."""
    apply("Diffusion")
    wanted = np.random.default_rng(0).uniform(size=(8, 8, 1)).astype("float32")

    class Known(keras.Model):
        def call(self, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
            image, angle = 2.0 * wanted - 1.0, inputs["angle"]
            noise = (inputs["image"] - tf.cos(angle) * image) / tf.sin(angle)
            return tf.cos(angle) * noise - tf.sin(angle) * image

    monkeypatch.setattr(task, "model", Known(), raising=False)
    for epoch in (1, 2):
        task.on_report({"epoch": epoch}, tmp_path, config.Config())
    for file in sorted((tmp_path / "samples").iterdir()):
        found = tf.io.decode_png(file.read_bytes()) / 255
        np.testing.assert_allclose(found, np.tile(wanted, [1, 8, 1]), atol=0.003)
    assert file.name == "epoch-0002.png"
    assert task.sample.experimental_get_tracing_count() == 1


def test_eight_of_ten_hidden_tokens_are_masks(apply: Apply) -> None:
    apply("Masked language model")
    tokens = (np.arange(20_000) % 19 + 2) % 20  # No masks; 0 is padding.
    shown, hidden = task.prepare_example(tf.constant(tokens), tf.constant(0), seed=tf.constant([1, 2]))
    is_hidden, shown = hidden.numpy() != 0, shown.numpy()
    np.testing.assert_array_equal(np.where(is_hidden, hidden, shown), tokens)
    assert is_hidden.sum() / (tokens != 0).sum() == pytest.approx(0.15, abs=0.02)
    assert (shown == 1)[is_hidden].mean() == pytest.approx(0.8, abs=0.04)
    assert (shown == tokens)[is_hidden].mean() == pytest.approx(0.1, abs=0.04)


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
    # The losses of a GAN oppose each other, so they need not fall.
    rest = ", 1 not compared" if title.startswith("WGAN") else "."
    assert lines[-1].endswith(f"checks passed{rest}"), "\n".join(lines)
    assert any("on one replica and on two" in line for line in lines)
