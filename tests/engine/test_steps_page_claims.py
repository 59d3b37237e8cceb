"""What docs/steps.md says of its recipes besides the losses: the updates, the networks that are kept, the samples."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from step_recipes import Apply, applier, assert_close, build, take_steps, weights

import task
import train
from engine.errors import BadInput, Stopped
from engine.run.checkpoint_files import read_checkpoint
from engine.run.signals import Signals


@pytest.fixture
def apply(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Apply:
    return applier(monkeypatch, tmp_path)


# --- Updates ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("title", "settings", "error", "reason"),
    [
        ("Mixup", {"micro_batches": 2}, BadInput, r"--micro-batches is 2, .* remove --micro-batches"),
        ("Sharpness-aware minimization (SAM)", {"micro_batches": 2}, ValueError, "SAM is not for --micro-batches"),
        ("Sharpness-aware minimization (SAM)", {"precision": "mixed_float16"}, ValueError, "SAM is not for"),
        ("WGAN-GP with five critic updates", {"global_batch_size": 16}, ValueError, "must be a multiple of 5"),
        ("WGAN-GP with five critic updates", {"micro_batches": 2}, BadInput, "computes a loss after an update"),
    ],
)
def test_recipe_refuses_what_it_cannot_do(
    title: str, settings: dict[str, Any], error: type[Exception], reason: str, apply: Apply
) -> None:
    needed = apply(title)
    build(1, **{**needed, **settings})
    with pytest.raises(error, match=reason):
        take_steps(1)


@pytest.mark.long
def test_teacher_follows_once_a_step(apply: Apply) -> None:
    apply("Mean teacher")
    build(2, micro_batches=2, keep_last_batch=True)
    students = [np.array(weights()["student/sequential/dense/kernel"])]
    np.testing.assert_array_equal(weights()["teacher/sequential_1/dense_2/kernel"], students[0])
    teacher = students[0].astype("float64")
    for number, (stack, first, _) in enumerate(train.batches["train"].iterator().take(2), 1):
        train.run_steps["train"](stack, first, 1)
        student, decay = weights()["student/sequential/dense/kernel"], min(0.99, 1 - 1 / (number + 1))
        teacher = decay * teacher + (1 - decay) * student
    np.testing.assert_allclose(weights()["teacher/sequential_1/dense_2/kernel"], teacher, atol=1e-6)


@pytest.mark.long
def test_critic_is_updated_five_times(apply: Apply) -> None:
    """The same in a plain loop, of fifths of the batches."""
    found = []
    for _ in range(2):
        build(1, learning_rate=1e-3, **apply("WGAN-GP with five critic updates"))
        found.append(weights())
        critic, generator = task.model["critic"], task.model["generator"]
        batches = [each[:2] for _, each in zip(range(3), train.batches["train"].one_by_one(), strict=False)]
        if len(found) == 1:
            take_steps(3)
            found[0] = weights()
    assert [int(task.optimizer[name].iterations.numpy()) for name in ("critic", "generator")] == [0, 0]
    for features, images in batches:
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
            variables = critic.trainable_variables
            task.optimizer["critic"].apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(critic(generator(features["noise"])))
        variables = generator.trainable_variables
        task.optimizer["generator"].apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    assert_close(weights(), found[0], rtol=1e-4)


@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.long)])
def test_sam_updates_by_the_gradient_at_the_moved_weights(replicas: int, apply: Apply) -> None:
    apply("Sharpness-aware minimization (SAM)")
    build(replicas, limit_steps=1)
    features, labels, _ = next(train.batches["train"].one_by_one())
    features, labels = (
        tf.concat(train.strategy.experimental_local_results(each), axis=0) for each in (features, labels)
    )
    variables = task.model.trainable_variables

    def gradients() -> list[np.ndarray]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(task.loss_objects["label"](labels, task.model(features)))
        return [each.numpy() for each in tape.gradient(loss, variables)]

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
    before = [each.numpy() for each in (*task.model.trainable_variables, *task.optimizer.variables)]
    take_steps(1)
    after = [each.numpy() for each in (*task.model.trainable_variables, *task.optimizer.variables)]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


# --- Generation -------------------------------------------------------------------------------------------------------


def test_known_velocity_leads_to_the_image(apply: Apply) -> None:
    """All images are one: then the velocity is known, and every sample is that image."""
    apply("Diffusion")
    wanted = np.random.default_rng(0).uniform(size=(8, 8, 1)).astype("float32")

    class Known(keras.Model):
        def call(self, inputs: dict[str, tf.Tensor]) -> tf.Tensor:
            image, angle = 2.0 * wanted - 1.0, inputs["angle"]
            noise = (inputs["image"] - tf.cos(angle) * image) / tf.sin(angle)
            return tf.cos(angle) * noise - tf.sin(angle) * image

    samples = task.sample(Known(), tf.random.stateless_normal([3, 8, 8, 1], [1, 2]))
    np.testing.assert_allclose(samples, np.stack([wanted] * 3), atol=1e-4)


def small_denoiser() -> keras.Model:
    image, angle = keras.Input((8, 8, 1), name="image"), keras.Input((1, 1, 1), name="angle")
    return keras.Model({"image": image, "angle": angle}, keras.layers.Dense(1)(image * angle))


@pytest.mark.long
def test_samples_are_written_and_compiled_once(
    apply: Apply, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    apply("Diffusion")
    monkeypatch.setattr(task, "create_model", small_denoiser)
    flags = ("--epochs=2", "--limit-steps=1", "--simulated-devices=1", "--global-batch-size=16", "--ema-decay=0.9")
    train.main([f"--run-dir={tmp_path / 'run'}", *flags])
    assert "task.on_report failed" not in capsys.readouterr().out
    images = [tf.io.decode_png(path.read_bytes()) for path in sorted((tmp_path / "run/samples").glob("*.png"))]
    assert [each.shape.as_list() for each in images] == [[32, 64, 1]] * 2
    assert task.sample.experimental_get_tracing_count() == 1


@pytest.mark.long
def test_eight_of_ten_hidden_tokens_are_masks(apply: Apply) -> None:
    apply("Masked language model")
    build(1, global_batch_size=120)
    found = [next(train.batches[split].one_by_one(epoch)) for split in ("train", "validation") for epoch in (0, 1)]
    (shown, hidden), *others = [(each[0].numpy(), each[1].numpy()) for each in found]
    is_hidden = hidden != 0
    tokens = np.where(is_hidden, hidden, shown)
    assert is_hidden.sum() / (tokens != 0).sum() == pytest.approx(0.15, abs=0.02)
    assert (shown == 1)[is_hidden].mean() == pytest.approx(0.8, abs=0.04)
    assert (shown == hidden)[is_hidden].mean() == pytest.approx(0.1, abs=0.04)
    assert not (shown == 1)[~is_hidden].any()
    assert not np.array_equal(hidden, others[0][1])  # The next pass.
    np.testing.assert_array_equal(others[1][1], others[2][1])  # Two evaluations.


# --- Layers that start late -------------------------------------------------------------------------------------------


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


def test_moments_settle_while_the_rate_is_zero() -> None:
    """Of gradients that were 0 at first, Adam makes updates of more than six times the rate."""

    def longest(gradient_at_first: float, rate_at_first: float) -> tuple[float, float]:
        weight = keras.Variable([1.0])
        optimizer = keras.optimizers.AdamW(rate_at_first, weight_decay=0.1)
        optimizer.build([weight])

        @tf.function
        def wait() -> None:
            for _ in tf.range(5000):
                optimizer.apply([tf.constant([gradient_at_first])], [weight])

        wait()
        frozen, optimizer.learning_rate, steps = float(weight.numpy()[0]), 1e-3, []
        for _ in range(20):
            before = float(weight.numpy()[0])
            optimizer.apply([tf.constant([1.0])], [weight])
            steps.append(before - float(weight.numpy()[0]))
        return frozen, max(steps)

    assert longest(1.0, 0.0) == (1.0, pytest.approx(0.0011, abs=1e-5))
    frozen, step = longest(0.0, 1e-3)
    assert frozen < 0.61
    assert 0.006 < step < 0.0068


# --- What is saved of which network -----------------------------------------------------------------------------------


@pytest.mark.parametrize("is_frozen", [True, False])
def test_statistics_of_a_follower_are_not_forgotten_by_the_average(is_frozen: bool, apply: Apply) -> None:
    """A follower measures nothing itself, so an average of what its layers have measured would stay at 0 and 1."""
    apply("Mean teacher")

    def create_model() -> dict[str, keras.Model]:
        def create() -> keras.Model:
            layers = [keras.layers.Flatten(), keras.layers.BatchNormalization(synchronized=True, momentum=0.5)]
            return keras.Sequential([keras.Input((8, 8, 1)), *layers, keras.layers.Dense(10)])

        models = {"student": create(), "teacher": create()}
        models["teacher"].trainable = not is_frozen
        return models

    task.create_model = create_model
    build(1, ema_decay=0.5, keep_last_batch=True, epochs=2, eager=True)
    averaged = {name.split("/")[0] for name in train.objects.average.averages}
    assert averaged == ({"student"} if is_frozen else {"student", "teacher"})
    take_steps(2)
    take_steps(2, epoch=1)
    name = next(name for name in train.objects.weights if "teacher" in name and name.endswith("moving_mean"))
    last = train.objects.weights[name].numpy()
    with train.run.evaluation_weights():
        found = train.objects.weights[name].numpy()
    assert last.max() > 0.1
    if is_frozen:
        np.testing.assert_array_equal(found, last)
    else:
        np.testing.assert_allclose(found, last, atol=0.2)
        assert found.max() > 0.1


@pytest.mark.long
def test_all_networks_of_the_dict_are_exported_and_start_another_run(
    apply: Apply, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    apply("Mean teacher")
    flags = ("--epochs=1", "--global-batch-size=16", "--limit-steps=1", "--simulated-devices=1")
    train.main([f"--run-dir={tmp_path / 'run'}", *flags, "--export"])
    found = {path.name for path in (tmp_path / "run/export").iterdir()}
    models = {f"{name}.{kind}" for name in ("student", "teacher") for kind in ("keras", "weights.h5")}
    assert found == {*models, "saved_model"}
    trained_weights = task.model["teacher"].get_weights()
    capsys.readouterr()
    train.main([f"--run-dir={tmp_path / 'other'}", *flags, f"--init-from={tmp_path / 'run'}", "--learning-rate=1e-30"])
    assert "8 of the model's 8 variables from" in capsys.readouterr().out
    for one, other in zip(task.model["teacher"].get_weights(), trained_weights, strict=True):
        np.testing.assert_allclose(one, other, atol=0.05)
    with pytest.raises(SystemExit):
        file = tmp_path / "run/export/teacher.keras"
        train.main([f"--run-dir={tmp_path / 'third'}", *flags, f"--init-from={file}"])
    assert "contains one model, and the task has student, teacher" in capsys.readouterr().err


@pytest.mark.long
def test_teacher_in_a_file_is_in_no_checkpoint_and_no_export(apply: Apply, tmp_path: Path) -> None:
    file = apply("Distillation from a trained teacher")["teacher"]
    flags = (f"--run-dir={tmp_path / 'run'}", "--simulated-devices=1")
    options = ("--epochs=1", "--global-batch-size=16", "--limit-steps=1", f"--teacher={file}")
    before = keras.models.load_model(file).get_weights()
    train.main([*flags, *options])
    for one, other in zip(task.teacher.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)
    for checkpoint in (*tmp_path.glob("run/checkpoints/*"), *tmp_path.glob("run/best/*")):
        values, _ = read_checkpoint(checkpoint)
        assert sum(name.startswith("model/") for name in values) == 4
        assert not [name for name in values if name.startswith("hidden/")]
    file.unlink()
    train.main([*flags, "--evaluate-only"])
    train.main([*flags, *options, "--export"])
    assert {path.name for path in (tmp_path / "run/export").iterdir()} == {
        *("model.keras", "model.weights.h5", "saved_model")
    }


# --- Complete runs ----------------------------------------------------------------------------------------------------


def stopped_after(executions: int) -> Callable[..., None]:
    left = iter(range(executions))

    def check(*_: Any) -> None:
        if next(left, None) is None:
            raise Stopped("stopped by a test")

    return check


@pytest.mark.long
def test_stopped_run_ends_with_the_same_bits(apply: Apply, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six steps with noise, of which the encoder waits for two; stopped after one and after two more."""
    apply("Layers that are frozen until a step")
    late = {name: getattr(task, name) for name in ("create_model", "create_optimizer")}
    apply("Random numbers in a step", **late)
    flags = ("--epochs=3", "--global-batch-size=16", "--keep-last-batch", "--simulated-devices=2")
    flags = (*flags, "--steps-per-execution=1")
    expected = train.main([f"--run-dir={tmp_path / 'whole'}", *flags])
    for executions in (1, 2):
        with monkeypatch.context() as stopping, pytest.raises(SystemExit) as ending:
            stopping.setattr(Signals, "check", stopped_after(executions))
            train.main([f"--run-dir={tmp_path / 'stopped'}", *flags])
        assert ending.value.code == 42
    found = train.main([f"--run-dir={tmp_path / 'stopped'}", *flags])
    assert found["weights_sha256"] == expected["weights_sha256"]
    assert found["epochs"] == 3


@pytest.mark.long
def test_codes_of_simclr_are_compared_in_float32_under_mixed_precision(apply: Apply) -> None:
    apply("Contrastive learning of one encoder (SimCLR)")
    build(2, precision="mixed_bfloat16", learning_rate=1e-3, limit_steps=2)
    assert np.isfinite(take_steps(1)).all()
