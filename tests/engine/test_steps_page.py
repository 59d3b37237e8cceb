"""The recipes of docs/steps.md, taken from the page as they stand there, on one replica, two and four."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import config
import task
import train
from engine.check.check import check_task
from engine.errors import BadInput, Stopped
from engine.model.variables import model_variables
from engine.run.checkpoint_files import read_checkpoint
from engine.run.signals import Signals
from pages import blocks, put, sections
from rendering import PROJECT
from rendering import run as run_program

RECIPES = sections("steps.md")
WITH_CODE = [title for title, text in RECIPES.items() if "```python" in text]
LOAD_EXAMPLES, CREATE_OPTIMIZER = task.load_examples, task.create_optimizer

Apply = Callable[..., None]
Values = dict[str, np.ndarray]


@pytest.fixture
def apply(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Apply:
    """Puts the blocks of a recipe into the modules that they are for, and other hooks into task.py."""
    monkeypatch.setattr(task, "create_model", small_model)
    monkeypatch.setattr(task, "load_examples", few_examples)
    monkeypatch.setattr(task, "create_optimizer", create_optimizer)

    def apply(title: str, **hooks: Any) -> None:
        for name, hook in hooks.items():
            monkeypatch.setattr(task, name, hook, raising=False)
        for block in blocks(RECIPES[title]):
            put(block, config if "class Config" in block else task, monkeypatch, tmp_path)
        monkeypatch.setattr(train, "Config", config.Config)

    return apply


def few_examples(split: str) -> tf.data.Dataset | None:
    return None if split == "test" else LOAD_EXAMPLES(split).take(120)


def small_model() -> keras.Model:
    layers = [keras.layers.Flatten(), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def create_optimizer(total_steps: int) -> keras.optimizers.Optimizer:
    """Its updates are in proportion to the gradient, so a gradient that is too large is not hidden."""
    return keras.optimizers.SGD(0.5)


def trained(
    steps: int = 3, reference: Callable[..., float] | None = None, **settings: Any
) -> tuple[list[float], Values, dict[str, float]]:
    """Returns the losses of some steps, the weights after them, and the metrics of training and validation.

    Compares the first loss with what `reference` makes of the batch, before the step.
    """
    train.build(config.Config(limit_steps=steps, **{"global_batch_size": 16, **settings}))
    expected = reference(*batches(1)[0]) if reference else None
    iterator = train.batches["train"].iterator().take(steps)
    losses = [loss for stack, first, count in iterator for loss in train.run_steps["train"](stack, first, count)]
    assert expected is None or float(losses[0]) == pytest.approx(expected, rel=1e-5)
    metrics = train.run.objects.results("train") | train.validate()
    return list(map(float, losses)), weights(), metrics


def weights() -> Values:
    return {name: variable.numpy() for name, variable in model_variables(task.model).items()}


def batches(count: int) -> list[Any]:
    """Returns the first batches of training, of one replica, as NumPy arrays."""
    taken = train.batches["train"].one_by_one()
    return [tf.nest.map_structure(lambda part: part.numpy(), batch) for batch in itertools.islice(taken, count)]


def assert_close(found: Any, expected: Any, rtol: float = 2e-5) -> None:
    """Compares losses, weights and metrics; of an array, with its largest value."""
    for (path, one), other in zip(enumerate(tf.nest.flatten(found)), tf.nest.flatten(expected), strict=True):
        scale = max(np.abs(other).max(initial=0.0), 1e-3)
        np.testing.assert_allclose(one, other, rtol=rtol, atol=rtol * scale, err_msg=str(path))


REPLICAS = pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.long)])


def assert_same_on_one(
    replicas: int, reference: Callable[..., float] | None = None, **settings: Any
) -> tuple[list[float], Values, dict[str, float]]:
    """Trains on several replicas and on one, with the loss of the `reference`; returns the results of one."""
    settings = {"micro_batches": 1, **settings}
    found = trained(simulated_devices=replicas, **settings)
    expected = trained(reference=reference, simulated_devices=1, **{**settings, "micro_batches": 1})
    assert_close(found, expected)
    return expected


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype("float64")
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def cross_entropy(labels: np.ndarray, logits: np.ndarray) -> np.ndarray:
    return -np.take_along_axis(log_softmax(logits), labels[..., None].astype(int), axis=-1)[..., 0]


def test_every_recipe_is_run() -> None:
    tested = Path(__file__).read_text(encoding="utf-8")
    assert len(WITH_CODE) >= 12
    assert not [title for title in WITH_CODE if f'"{title}"' not in tested]


def test_blocks_are_short() -> None:
    for title in WITH_CODE:
        for block in blocks(RECIPES[title]):
            lines = [line for line in block.splitlines() if line]
            assert len(lines) <= 40, title
            assert max(map(len, lines)) <= 100, title


# --- Random numbers ---------------------------------------------------------------------------------------------------


def test_noise_is_that_of_the_example(apply: Apply) -> None:
    apply("Random numbers in a step")

    def loss(features: Any, labels: np.ndarray, sample_weights: np.ndarray) -> float:
        noise = [tf.random.stateless_normal((8, 8, 1), seed) for seed in features["seed"]]
        logits = task.model(features["image"] + 0.1 * np.stack(noise)).numpy()
        return cross_entropy(labels, logits).mean()

    assert_same_on_one(2, loss, micro_batches=2)
    seeds = [batch[0]["seed"] for batch in (*batches(3), next(train.batches["train"].one_by_one(1)))]
    assert len({tuple(seed) for each in seeds for seed in np.asarray(each)}) == 4 * 16


# --- Means over something other than examples -------------------------------------------------------------------------


def token_examples(split: str) -> tf.data.Dataset | None:
    """Rows of pixels, and as labels how bright each row is; 0 is a row of padding."""
    examples = few_examples(split)
    return examples and examples.map(lambda image, label: (image, tf.cast(image[:, 4, 0] // 4.0, tf.int32)))


def token_model() -> keras.Model:
    layers = [keras.layers.Reshape((8, 8)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def prepare_plainly(features: tf.Tensor, labels: Any) -> tuple[tf.Tensor, Any]:
    return features / 16.0, labels


@REPLICAS
def test_each_token_counts_the_same(replicas: int, apply: Apply) -> None:
    hooks = {"load_examples": token_examples, "create_model": token_model, "prepare_example": prepare_plainly}
    apply("A mean over tokens", **hooks)

    def loss(features: np.ndarray, labels: np.ndarray, sample_weights: np.ndarray) -> float:
        return cross_entropy(labels, task.model(features).numpy())[labels != 0].mean()

    assert_same_on_one(replicas, loss, micro_batches=2)


def boxes(split: str) -> tf.data.Dataset | None:
    def box(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        return image, {"is_object": tf.cast(label < 3, tf.float32), "box": image[2:4, 2:4, 0][0] / 16.0}

    def four(image: tf.Tensor, labels: dict[str, tf.Tensor]) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        return image, {**labels, "box": tf.concat([labels["box"], 1.0 - labels["box"]], axis=0)}

    examples = few_examples(split)
    return examples and examples.map(box).map(four)


def box_model() -> keras.Model:
    inputs = keras.Input((8, 8, 1))
    hidden = keras.layers.Dense(8, activation="tanh")(keras.layers.Flatten()(inputs))
    return keras.Model(
        inputs, {"is_object": keras.layers.Dense(1)(hidden), "box": keras.layers.Dense(4, dtype="float32")(hidden)}
    )


@pytest.mark.long
def test_boxes_are_averaged_over_the_objects(apply: Apply) -> None:
    hooks = {"load_examples": boxes, "create_model": box_model, "prepare_example": prepare_plainly}
    apply("A term for positives only", **hooks)

    def loss(features: np.ndarray, labels: Any, sample_weights: np.ndarray) -> float:
        found = {name: each.numpy().astype("float64") for name, each in task.model(features).items()}
        is_object = labels["is_object"].astype(bool)
        entropy = np.log1p(np.exp(np.where(is_object, -1, 1) * found["is_object"][:, 0]))
        return entropy.mean() + np.square(labels["box"] - found["box"])[is_object].mean()

    assert_same_on_one(2, loss, micro_batches=2, monitor="validation/box_loss")


def two_heads(split: str) -> tf.data.Dataset | None:
    def labels(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
        return image, {"digit": tf.where(label == 7, -1, label), "is_odd": tf.where(label > 3, -1, label % 2)}

    examples = few_examples(split)
    return examples and examples.map(labels)


def two_headed_model() -> keras.Model:
    inputs = keras.Input((8, 8, 1))
    hidden = keras.layers.Dense(8, activation="tanh")(keras.layers.Flatten()(inputs))
    return keras.Model(inputs, {"digit": keras.layers.Dense(10)(hidden), "is_odd": keras.layers.Dense(2)(hidden)})


def test_heads_are_averaged_over_their_labels(apply: Apply) -> None:
    hooks = {"load_examples": two_heads, "create_model": two_headed_model, "prepare_example": prepare_plainly}
    apply("Several heads with missing labels", **hooks)

    def loss(features: np.ndarray, labels: Any, sample_weights: np.ndarray) -> float:
        logits = {head: each.numpy()[labels[head] >= 0] for head, each in task.model(features).items()}
        return sum(cross_entropy(labels[head][labels[head] >= 0], each).mean() for head, each in logits.items())

    assert_same_on_one(2, loss, micro_batches=2, monitor="validation/digit_loss")


# --- Losses across the batch ------------------------------------------------------------------------------------------


def encoder(last: int = 6) -> keras.Model:
    layers = [keras.layers.Flatten(), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(last)]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def unit(codes: np.ndarray) -> np.ndarray:
    return codes / np.linalg.norm(codes, axis=-1, keepdims=True)


@REPLICAS
def test_simclr_has_the_negatives_of_all_replicas(replicas: int, apply: Apply) -> None:
    apply("Contrastive learning of one encoder (SimCLR)", create_model=encoder)

    def loss(features: Any, labels: np.ndarray, sample_weights: np.ndarray) -> float:
        """NT-Xent: the views 2 k and 2 k + 1 are those of an example."""
        views = features["views"].reshape(-1, 8, 8, 1)
        codes = unit(task.model(views).numpy().astype("float64"))
        scores = codes @ codes.T / 0.5
        np.fill_diagonal(scores, -np.inf)
        return cross_entropy(np.arange(len(views)) ^ 1, np.where(np.isinf(scores), -1e30, scores)).mean()

    assert_same_on_one(replicas, loss)
    views = batches(1)[0][0]["views"]
    assert (views[:, 0] != views[:, 1]).any(axis=(1, 2, 3)).sum() > 8


def test_clip_has_the_pairs_of_all_replicas(apply: Apply) -> None:
    apply("Contrastive learning of two encoders (CLIP)")

    def loss(features: Any, labels: np.ndarray, sample_weights: np.ndarray) -> float:
        image, text = (task.model[name](features[name]).numpy().astype("float64") for name in ("image", "text"))
        np.testing.assert_allclose(np.linalg.norm(text, axis=-1), 1 / 0.07, rtol=1e-5)
        scores, places = image @ text.T, np.arange(len(image))
        return (cross_entropy(places, scores).mean() + cross_entropy(places, scores.T).mean()) / 2

    _, after, _ = assert_same_on_one(2, loss, learning_rate=0.05)
    (factor,) = (value for name, value in after.items() if "log_factor" in name)
    assert factor != np.float32(np.log(1 / 0.07))


@REPLICAS
def test_mixup_partners_are_of_the_global_batch(replicas: int, apply: Apply) -> None:
    apply("Mixup")

    def loss(features: Any, labels: np.ndarray, sample_weights: np.ndarray) -> float:
        kept = features["kept"].astype("float64")
        assert kept.std() > 0.2
        share = kept[:, None, None, None]
        mixed = share * features["image"] + (1 - share) * np.roll(features["image"], -1, axis=0)
        logits = task.model(mixed.astype("float32")).numpy()
        both = kept * cross_entropy(labels, logits) + (1 - kept) * cross_entropy(np.roll(labels, -1), logits)
        return both.mean()

    assert_same_on_one(replicas, loss)


@pytest.mark.long
@pytest.mark.parametrize(
    "title", ["Contrastive learning of one encoder (SimCLR)", "Contrastive learning of two encoders (CLIP)", "Mixup"]
)
def test_padding_is_not_compared(title: str, apply: Apply) -> None:
    """The last of the batches of training has 8 examples and 8 of padding."""
    apply(title, **({"create_model": encoder} if "SimCLR" in title else {}))
    assert_same_on_one(2, steps=8, keep_last_batch=True, learning_rate=0.01)
    last = batches(8)[-1]
    assert last[2].tolist() == [1.0] * 8 + [0.0] * 8


@pytest.mark.parametrize(
    "title", ["Contrastive learning of one encoder (SimCLR)", "Contrastive learning of two encoders (CLIP)", "Mixup"]
)
def test_comparison_in_micro_batches_is_refused(title: str, apply: Apply) -> None:
    apply(title, **({"create_model": encoder} if "SimCLR" in title else {}))
    with pytest.raises(BadInput, match=r"--micro-batches is 2, .* remove --micro-batches"):
        trained(1, simulated_devices=1, micro_batches=2)


WGAN = {"global_batch_size": 40, "monitor": "validation/distance", "monitor_direction": "min"}

# --- Several networks -------------------------------------------------------------------------------------------------


def partly_labelled(split: str) -> tf.data.Dataset | None:
    examples = few_examples(split)
    return examples and examples.map(lambda image, label: (image, tf.where(label > 4, -1, label)))


def test_student_learns_from_labels_and_the_teacher(apply: Apply) -> None:
    apply("Mean teacher", load_examples=partly_labelled)

    def loss(features: Any, labels: np.ndarray, sample_weights: np.ndarray) -> float:
        logits = task.model["student"](features["student"]).numpy()
        targets = task.model["teacher"](features["teacher"]).numpy()
        of_label = (cross_entropy(np.maximum(labels, 0), logits) * (labels >= 0)).mean()
        return of_label + np.square(np.exp(log_softmax(logits)) - np.exp(log_softmax(targets))).mean()

    assert_same_on_one(2, loss, micro_batches=2, learning_rate=0.01)


@pytest.mark.long
def test_teacher_follows_once_a_step(apply: Apply) -> None:
    apply("Mean teacher", load_examples=partly_labelled)
    train.build(config.Config(global_batch_size=16, simulated_devices=2, micro_batches=2))
    students = [np.array(weights()["student/sequential/dense/kernel"])]
    np.testing.assert_array_equal(weights()["teacher/sequential_1/dense_2/kernel"], students[0])
    teacher = students[0].astype("float64")
    for number, (stack, first, _) in enumerate(train.batches["train"].iterator().take(4), 1):
        train.run_steps["train"](stack, first, 1)
        student, decay = weights()["student/sequential/dense/kernel"], min(0.99, 1 - 1 / (number + 1))
        teacher = decay * teacher + (1 - decay) * student
    np.testing.assert_allclose(weights()["teacher/sequential_1/dense_2/kernel"], teacher, atol=1e-6)


@pytest.mark.long
def test_student_learns_from_the_teacher_in_a_file(apply: Apply, tmp_path: Path) -> None:
    teacher = encoder(10)
    teacher.save(tmp_path / "teacher.keras")
    apply("Distillation from a trained teacher")
    before = teacher.get_weights()

    def loss(features: np.ndarray, labels: np.ndarray, sample_weights: np.ndarray) -> float:
        logits, wanted = task.model(features).numpy(), teacher(features).numpy()
        soft = -(np.exp(log_softmax(wanted / 4)) * log_softmax(logits / 4)).sum(axis=-1)
        return (0.1 * cross_entropy(labels, logits) + 0.9 * 16 * soft).mean()

    settings = {"teacher": tmp_path / "teacher.keras", "learning_rate": 0.01}
    _, after, _ = assert_same_on_one(2, loss, micro_batches=2, **settings)
    assert len(after) == 4  # The student's; the teacher is not in the state.
    for one, other in zip(task.teacher.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.long
def test_critic_is_updated_five_times(apply: Apply) -> None:
    apply("WGAN-GP with five critic updates")
    _, after, _ = assert_same_on_one(2, learning_rate=1e-3, **WGAN)
    assert [int(task.optimizer[name].iterations.numpy()) for name in ("critic", "generator")] == [15, 3]

    # The same in a plain loop, of fifths of the batches.
    apply("WGAN-GP with five critic updates")
    train.build(config.Config(simulated_devices=1, learning_rate=1e-3, limit_steps=3, **WGAN))
    critic, generator = task.model["critic"], task.model["generator"]
    for features, images, _ in batches(3):
        for part in range(5):
            noise, mix, real = features["noise"][part::5], features["mix"][part::5], images[part::5]
            with tf.GradientTape() as tape:
                made = tf.stop_gradient(generator(noise))
                between = tf.constant(mix * real + (1 - mix) * made.numpy())
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
    assert_close(weights(), after, rtol=1e-4)


def test_parts_that_depend_on_the_replicas_are_refused(apply: Apply) -> None:
    apply("WGAN-GP with five critic updates")
    with pytest.raises(ValueError, match="per-replica batch size must be a multiple of 5"):
        trained(1, simulated_devices=1, **{**WGAN, "global_batch_size": 16})
    with pytest.raises(BadInput, match="computes a loss after an update"):
        trained(1, simulated_devices=1, micro_batches=2, **WGAN)


# --- Other gradients --------------------------------------------------------------------------------------------------


@REPLICAS
def test_sam_updates_by_the_gradient_at_the_moved_weights(replicas: int, apply: Apply) -> None:
    apply("Sharpness-aware minimization (SAM)")
    train.build(config.Config(global_batch_size=16, simulated_devices=1))
    features, labels, _ = batches(1)[0]
    variables = task.model.trainable_variables

    def gradients() -> list[np.ndarray]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(task.loss_objects["label"](labels, task.model(features)))
        return [each.numpy() for each in tape.gradient(loss, variables)]

    before, first = task.model.get_weights(), gradients()
    norm = np.sqrt(sum(np.square(each).sum() for each in first))
    task.model.set_weights([each + 0.05 / norm * gradient for each, gradient in zip(before, first, strict=True)])
    expected = [each - 0.5 * gradient for each, gradient in zip(before, gradients(), strict=True)]
    trained(1, simulated_devices=replicas)
    assert_close(task.model.get_weights(), expected)


@pytest.mark.long
def test_sam_agrees_on_one_replica(apply: Apply) -> None:
    apply("Sharpness-aware minimization (SAM)")
    assert_same_on_one(2)


def test_large_gradients_change_nothing(apply: Apply, monkeypatch: pytest.MonkeyPatch) -> None:
    apply("Updates that are skipped", create_optimizer=lambda total_steps: keras.optimizers.AdamW(0.01, epsilon=1e-5))
    expected = assert_same_on_one(2)
    monkeypatch.setattr(task, "LARGEST_NORM", 1e-9)
    train.build(config.Config(global_batch_size=16, simulated_devices=2, limit_steps=3))
    before = [each.numpy() for each in (*task.model.trainable_variables, *task.optimizer.variables)]
    for stack, first, count in train.batches["train"].iterator().take(3):
        train.run_steps["train"](stack, first, count)
    after = [each.numpy() for each in (*task.model.trainable_variables, *task.optimizer.variables)]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    assert any((value != expected[1][name]).any() for name, value in weights().items())


@pytest.mark.parametrize("settings", [{"micro_batches": 2}, {"precision": "mixed_float16"}], ids=str)
def test_sam_without_the_gradient_of_the_batch_is_refused(settings: dict[str, Any], apply: Apply) -> None:
    apply("Sharpness-aware minimization (SAM)")
    with pytest.raises(ValueError, match="SAM is not for --micro-batches"):
        trained(1, simulated_devices=1, **settings)


def test_attack_moves_each_pixel_by_epsilon(apply: Apply) -> None:
    apply("Adversarial examples (FGSM)")

    def loss(features: np.ndarray, labels: np.ndarray, sample_weights: np.ndarray) -> float:
        changed = []
        for image, label in zip(features, labels, strict=True):
            pixels = tf.constant(image[None])
            with tf.GradientTape() as tape:
                tape.watch(pixels)
                one = task.loss_objects["label"](label[None], task.model(pixels))
            changed.append(np.clip(image + 0.05 * np.sign(tape.gradient(one, pixels)[0].numpy()), 0, 1))
        plain, attacked = (cross_entropy(labels, task.model(np.stack(each)).numpy()) for each in (features, changed))
        assert (attacked > plain).mean() > 0.9
        return attacked.mean()

    assert_same_on_one(2, loss, micro_batches=2)


# --- Generation -------------------------------------------------------------------------------------------------------


def small_denoiser() -> keras.Model:
    image, angle = keras.Input((8, 8, 1), name="image"), keras.Input((1, 1, 1), name="angle")
    return keras.Model({"image": image, "angle": angle}, keras.layers.Dense(1)(image * angle))


def test_noise_and_time_are_those_of_the_example(apply: Apply) -> None:
    apply("Diffusion")

    def loss(features: Any, labels: np.ndarray, sample_weights: np.ndarray) -> float:
        losses = []
        for seed, image in zip(features["seed"], labels, strict=True):
            one, two = tf.unstack(tf.random.split(seed, 2))
            angle = float(tf.random.stateless_uniform([], one, maxval=np.pi / 2))
            noise = tf.random.stateless_normal([8, 8, 1], two).numpy()
            noisy = np.float32(np.cos(angle) * image + np.sin(angle) * noise)
            found = task.model({"image": noisy[None], "angle": np.full([1, 1, 1, 1], angle, "float32")})[0].numpy()
            # The image that it stands for is as far away as the velocity, times the sine.
            losses.append(np.square(found - (np.cos(angle) * noise - np.sin(angle) * image)).mean())
        return np.mean(losses)

    assert_same_on_one(2, loss, micro_batches=2, learning_rate=0.01)


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


WORDS = 20


def sentences(split: str) -> tf.data.Dataset | None:
    def tokens(image: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.cast(tf.reshape(image, [64]), tf.int32) + tf.where(tf.range(64) < 50 + label, 2, -99), label

    examples = few_examples(split)
    return examples and examples.map(tokens).map(lambda words, label: (tf.maximum(words, 0), label))


def filling_model() -> keras.Model:
    layers = [keras.layers.Embedding(WORDS, 8), keras.layers.Dense(8, "tanh"), keras.layers.Dense(WORDS)]
    return keras.Sequential([keras.Input((64,), dtype="int32"), *layers])


@pytest.mark.long
def test_masked_tokens_are_those_of_the_example(apply: Apply) -> None:
    apply("A mean over tokens", load_examples=sentences, create_model=filling_model)
    apply("Masked language model")

    def loss(features: np.ndarray, labels: np.ndarray, sample_weights: np.ndarray) -> float:
        return cross_entropy(labels, task.model(features).numpy())[labels != 0].mean()

    assert_same_on_one(2, loss, micro_batches=2)


def test_eight_of_ten_hidden_tokens_are_masks(apply: Apply) -> None:
    apply("A mean over tokens", load_examples=sentences, create_model=filling_model)
    apply("Masked language model")
    train.build(config.Config(global_batch_size=120, simulated_devices=1))
    found = [next(train.batches[split].one_by_one(epoch)) for split in ("train", "validation") for epoch in (0, 1)]
    (shown, hidden), *others = [(each[0].numpy(), each[1].numpy()) for each in found]
    tokens = np.where(hidden != 0, hidden, shown)
    assert (hidden != 0).sum() / (tokens != 0).sum() == pytest.approx(0.15, abs=0.02)
    is_hidden = hidden != 0
    assert (shown == 1)[is_hidden].mean() == pytest.approx(0.8, abs=0.04)
    assert (shown == hidden)[is_hidden].mean() == pytest.approx(0.1, abs=0.04)
    assert not (shown == 1)[~is_hidden].any()
    assert not np.array_equal(hidden, others[0][1])  # The next pass.
    np.testing.assert_array_equal(others[1][1], others[2][1])  # Two evaluations.


# --- Layers that start late -------------------------------------------------------------------------------------------


def with_convolution() -> keras.Model:
    hidden = [keras.layers.Conv2D(2, 3, activation="gelu"), keras.layers.Flatten()]
    return keras.Sequential([keras.Input((8, 8, 1)), *hidden, keras.layers.Dense(10)])


@pytest.mark.long
def test_late_layers_agree_on_one_replica(apply: Apply) -> None:
    apply("Layers that are frozen until a step", create_model=with_convolution)
    assert_same_on_one(2, steps=7, epochs=3, learning_rate=0.01, micro_batches=2)


def test_encoder_starts_at_its_step(apply: Apply) -> None:
    apply("Layers that are frozen until a step", create_model=with_convolution)
    # 7 steps an epoch; of 21 steps the first 7 are without the encoder.
    train.build(config.Config(global_batch_size=16, simulated_devices=2, epochs=3, learning_rate=0.1))
    kernel = next(name for name in weights() if "conv2d/kernel" in name)
    values = [weights()[kernel]]
    for stack, first, count in train.batches["train"].iterator().take(7):
        for index in range(first, first + count):
            train.run_steps["train"](stack, index, 1)
            values.append(weights()[kernel])
    for stack, first, _ in train.batches["train"].iterator(1).take(1):
        train.run_steps["train"](stack, first, 1)
    for value in values[1:]:
        np.testing.assert_array_equal(value, values[0])
    # A tenth of the rate of the head; Adam's first step is as long as the rate, later ones are shorter.
    moved = np.abs(weights()[kernel] - values[0]).max()
    assert 0.001 < moved < 0.011


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


def test_only_networks_that_are_trained_are_averaged(apply: Apply) -> None:
    apply("Mean teacher", load_examples=partly_labelled)
    train.build(config.Config(global_batch_size=16, simulated_devices=1, ema_decay=0.9))
    assert {name.split("/")[0] for name in train.objects.average.averages} == {"student"}
    assert {name.split("/")[0] for name in train.objects.weights} == {"student", "teacher"}


@pytest.mark.parametrize("is_frozen", [True, False])
def test_statistics_of_a_follower_are_not_forgotten_by_the_average(is_frozen: bool, apply: Apply) -> None:
    """A follower measures nothing itself, so an average of what its layers have measured would stay at 0 and 1."""
    apply("Mean teacher", load_examples=partly_labelled)

    def create_model() -> dict[str, keras.Model]:
        def create() -> keras.Model:
            layers = [keras.layers.Flatten(), keras.layers.BatchNormalization(synchronized=True, momentum=0.5)]
            return keras.Sequential([keras.Input((8, 8, 1)), *layers, keras.layers.Dense(10)])

        models = {"student": create(), "teacher": create()}
        models["teacher"].trainable = not is_frozen
        return models

    task.create_model = create_model
    train.build(config.Config(global_batch_size=16, simulated_devices=2, ema_decay=0.5))
    for stack, first, _ in train.batches["train"].iterator().take(4):
        train.run_steps["train"](stack, first, 1)
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
    apply("Mean teacher", load_examples=partly_labelled)
    flags = ("--epochs=1", "--global-batch-size=40", "--simulated-devices=1")
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
    encoder(10).save(tmp_path / "teacher.keras")
    apply("Distillation from a trained teacher")
    flags = (f"--run-dir={tmp_path / 'run'}", "--simulated-devices=1")
    options = ("--epochs=1", "--global-batch-size=40", f"--teacher={tmp_path / 'teacher.keras'}")
    train.main([*flags, *options])
    for checkpoint in (*tmp_path.glob("run/checkpoints/*"), *tmp_path.glob("run/best/*")):
        values, _ = read_checkpoint(checkpoint)
        assert sum(name.startswith("model/") for name in values) == 4
        assert not [name for name in values if name.startswith("hidden/")]
    (tmp_path / "teacher.keras").unlink()
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
@pytest.mark.parametrize(
    ("title", "hooks", "flags"),
    [
        ("Random numbers in a step", {}, ()),
        ("Layers that are frozen until a step", {"create_model": with_convolution}, ()),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_stopped_run_ends_with_the_same_bits(
    title: str,
    hooks: dict[str, Any],
    flags: tuple[str, ...],
    apply: Apply,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nine steps, of which the encoder of the last recipe waits for three; stopped after two and after two more."""
    apply(title, **hooks)
    flags = ("--epochs=3", "--global-batch-size=40", "--simulated-devices=2", "--steps-per-execution=1", *flags)
    expected = train.main([f"--run-dir={tmp_path / 'whole'}", *flags])
    for _ in range(2):
        with monkeypatch.context() as stopping, pytest.raises(SystemExit) as ending:
            stopping.setattr(Signals, "check", stopped_after(2))
            train.main([f"--run-dir={tmp_path / 'stopped'}", *flags])
        assert ending.value.code == 42
    found = train.main([f"--run-dir={tmp_path / 'stopped'}", *flags])
    assert found["weights_sha256"] == expected["weights_sha256"]
    assert found["epochs"] == 3


def test_samples_are_written_and_compiled_once(
    apply: Apply, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    apply("Diffusion")
    monkeypatch.setattr(task, "create_model", small_denoiser)
    flags = ("--epochs=2", "--limit-steps=1", "--simulated-devices=2", "--ema-decay=0.9")
    train.main([f"--run-dir={tmp_path / 'run'}", *flags])
    assert "task.on_report failed" not in capsys.readouterr().out
    images = [tf.io.decode_png(path.read_bytes()) for path in sorted((tmp_path / "run/samples").glob("*.png"))]
    assert [each.shape.as_list() for each in images] == [[32, 64, 1]] * 2
    assert task.sample.experimental_get_tracing_count() == 1


def test_no_recipe_starts_tensorflow_when_it_is_imported() -> None:
    """The CPU can be divided into simulated devices only before that."""
    found = [block for title in WITH_CODE for block in blocks(RECIPES[title])]
    program = f"""
import task, config, train, tensorflow as tf
for block in {found!r}:
    exec(block, vars(config if "class Config" in block else task))
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
"""
    done = run_program("python", "-c", program, folder=PROJECT)
    assert done.returncode == 0, done.stderr


# --- What --check says ------------------------------------------------------------------------------------------------

CHECKED: dict[str, dict[str, Any]] = {
    "Random numbers in a step": {},
    "A mean over tokens": {
        "load_examples": token_examples,
        "create_model": token_model,
        "prepare_example": prepare_plainly,
    },
    "A term for positives only": {
        "load_examples": boxes,
        "create_model": box_model,
        "prepare_example": prepare_plainly,
        "monitor": "validation/box_loss",
    },
    "Several heads with missing labels": {
        "load_examples": two_heads,
        "create_model": two_headed_model,
        "prepare_example": prepare_plainly,
        "monitor": "validation/digit_loss",
    },
    "Contrastive learning of one encoder (SimCLR)": {"create_model": encoder},
    "Contrastive learning of two encoders (CLIP)": {},
    "Mixup": {},
    "Mean teacher": {"load_examples": partly_labelled},
    "Distillation from a trained teacher": {},
    "WGAN-GP with five critic updates": WGAN,
    "Sharpness-aware minimization (SAM)": {},
    "Updates that are skipped": {},
    "Adversarial examples (FGSM)": {},
    "Diffusion": {},
    "Masked language model": {"load_examples": sentences, "create_model": filling_model},
    "Layers that are frozen until a step": {"create_model": with_convolution},
}


def put_with_data(title: str, apply: Apply, folder: Path) -> dict[str, Any]:
    """Applies a recipe, with data and a model that fit it; returns the settings that it needs."""
    hooks = {name: each for name, each in CHECKED[title].items() if callable(each)}
    settings = {name: each for name, each in CHECKED[title].items() if not callable(each)}
    if title == "Masked language model":
        apply("A mean over tokens")
    apply(title, **{"create_optimizer": CREATE_OPTIMIZER, **hooks})
    if title == "Distillation from a trained teacher":
        settings["teacher"] = folder / "teacher.keras"
        encoder(10).save(settings["teacher"])
    return settings


# Recipes whose loss is of the same kind as another one's.
ALIKE = {
    "A term for positives only",
    "Contrastive learning of two encoders (CLIP)",
    "Distillation from a trained teacher",
    "Adversarial examples (FGSM)",
    "Random numbers in a step",
    "Masked language model",
    "Updates that are skipped",
}


@pytest.mark.long
@pytest.mark.parametrize("title", [title for title in WITH_CODE if title not in ALIKE])
def test_recipe_passes_all_checks(title: str, apply: Apply, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = put_with_data(title, apply, tmp_path)
    capsys.readouterr()
    check_task(train, task, config.Config(run_dir=tmp_path / "run", **settings))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].endswith("checks passed."), "\n".join(lines)
    assert any("on one replica and on two" in line for line in lines)


@pytest.mark.long
@pytest.mark.parametrize("title", ["Contrastive learning of one encoder (SimCLR)"])
def test_recipe_trains_in_mixed_precision(title: str, apply: Apply, tmp_path: Path) -> None:
    settings = put_with_data(title, apply, tmp_path)
    losses, _, _ = trained(2, simulated_devices=2, precision="mixed_bfloat16", learning_rate=1e-3, **settings)
    assert np.isfinite(losses).all()
