"""The recipes of docs/detection.md, taken from the page as they stand there, and compared with NumPy."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from step_recipes import assert_close, take_steps, weights

import config
import task
import train
from engine.check import check_task
from engine.errors import BadInput
from engine.run.initial_weights import load_initial_weights
from pages import blocks, put, sections, untested

RECIPES = sections("detection.md")
BATCH = 16
CREATE_OPTIMIZER = task.create_optimizer

Apply = Callable[..., None]


@pytest.fixture
def apply(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Apply:
    """Puts recipes into place, with a plain optimizer and a batch and a half of examples unless they are `complete`."""

    def apply(*titles: str, complete: bool = False) -> None:
        # Its updates are in proportion to the gradient, so a gradient that is too large is not hidden.
        optimizer = CREATE_OPTIMIZER if complete else lambda total_steps: keras.optimizers.SGD(0.01)
        monkeypatch.setattr(task, "create_optimizer", optimizer)
        for title in titles:
            for block in blocks(RECIPES[title]):
                put(block, config if "class Config" in block else task, monkeypatch, tmp_path)
        monkeypatch.setattr(train, "Config", config.Config)
        if not complete:
            load_examples = task.load_examples
            monkeypatch.setattr(task, "load_examples", lambda split: load_examples(split).take(BATCH + 10))

    return apply


def build(replicas: int = 1, **settings: Any) -> None:
    train.build(config.Config(**{"global_batch_size": BATCH, "simulated_devices": replicas, **settings}))


def first_batches(count: int = 2) -> list[tuple[Any, Any]]:
    """Returns features and labels of the first batches of training, on one replica, without padding."""
    found = []
    for batch, _ in zip(train.batches["train"].one_by_one(), range(count), strict=False):
        is_real = batch[2].numpy() > 0
        found.append(tf.nest.map_structure(lambda part, is_real=is_real: part.numpy()[is_real], batch[:2]))
    return found


def assert_losses_are(formula: Callable[[Any, Any], float], **settings: Any) -> None:
    """Compares the losses of two steps, the second one with padding, with a formula, and with those of two replicas."""
    given = {"keep_last_batch": True, "learning_rate": 0.01, **settings}
    build(1, **given)
    assert [len(tf.nest.flatten(labels)[0]) for _, labels in first_batches()] == [BATCH, 10]
    ((stack, _, size),) = train.batches["train"].iterator().take(2)
    assert int(size) == 2
    losses = []
    for step, (features, labels) in enumerate(first_batches()):
        expected = formula(features, labels)
        losses += map(float, train.run_steps["train"](stack, tf.constant(step), tf.constant(1)))
        assert losses[-1] == pytest.approx(expected, rel=1e-5)
    one = losses, weights(), train.run.objects.results("train") | train.evaluate_split("validation")
    build(2, micro_batches=2, **given)
    two = take_steps(2), weights(), train.run.objects.results("train") | train.evaluate_split("validation")
    assert_close(two, one, rtol=1e-5)


def findings(capsys: pytest.CaptureFixture[str], folder: Path, **settings: Any) -> list[str]:
    """Returns the lines of --check that begin with FAIL."""
    capsys.readouterr()
    check_task(train, task, config.Config(run_dir=folder / "run", **{"global_batch_size": BATCH, **settings}))
    lines = capsys.readouterr().out.splitlines()
    assert "checks" in lines[-1], "\n".join(lines)
    return [line for line in lines if "FAIL" in line]


def test_every_recipe_is_run() -> None:
    assert not untested(RECIPES, __file__)


# --- Detection --------------------------------------------------------------------------------------------------------

MONITOR = {"monitor": "validation/map", "monitor_direction": "max"}


def loss_of_boxes(features: np.ndarray, labels: dict[str, np.ndarray]) -> float:
    """One box after the other."""
    outputs = {name: each.numpy().astype("float64") for name, each in task.model(features).items()}
    total, count = 0.0, 0
    for number, (classes, boxes) in enumerate(zip(labels["class"], labels["box"], strict=True)):
        logits, found = outputs["class"][number], outputs["box"][number]
        wanted = np.zeros((64, 2))
        for kind, (top, left, bottom, right) in zip(classes, boxes, strict=True):
            if kind == 0:
                continue
            row, column = int((top + bottom) / 2 * 8), int((left + right) / 2 * 8)
            wanted[8 * row + column, kind - 1] = 1.0
            middle = np.array([row + 0.5, column + 0.5, row + 0.5, column + 0.5])
            total += np.abs(found[8 * row + column] - (8 * np.array([top, left, bottom, right]) - middle)).sum()
            count += 1
        scores = 1.0 / (1.0 + np.exp(-logits))
        right_scores = np.where(wanted > 0, scores, 1.0 - scores)
        balance = np.where(wanted > 0, 0.25, 0.75)
        total += (-balance * (1.0 - right_scores) ** 2 * np.log(right_scores)).sum()
    assert count > 20
    return total / count


def test_detection_is_divided_by_the_boxes_of_the_global_batch(apply: Apply) -> None:
    apply("Detection", "Mean average precision")
    assert_losses_are(loss_of_boxes, **MONITOR)


def test_boxes_move_with_the_image(apply: Apply) -> None:
    """In each box lie the pixels of its class, flipped or not."""
    apply("Detection")
    build()
    plain = next(task.load_examples("train").batch(26).as_numpy_iterator())
    flips = 0
    for features, labels in first_batches():
        for image, classes, boxes in zip(features, labels["class"], labels["box"], strict=True):
            flips += not any(np.array_equal(image, each) for each in plain[0])
            for number, (top, left, bottom, right) in zip(classes, np.rint(32 * boxes).astype(int), strict=True):
                if number:
                    assert image[top:bottom, left:right].mean() == pytest.approx(number / 2, abs=0.1)
                    edge = np.concatenate([image[top:bottom, left], image[top:bottom, right - 1]])
                    assert edge.mean() == pytest.approx(number / 2, abs=0.2)
    assert 5 < flips < 21


def average_precision(detections: list[tuple[float, int, np.ndarray]], boxes: dict[int, np.ndarray]) -> float:
    """Of one class: detections are (score, image, box), in any order; the rule of Pascal VOC, one after the other."""
    taken, hits = set(), []
    for _, image, box in sorted(detections, key=lambda each: -each[0]):
        best, place = 0.0, -1
        for number, other in enumerate(boxes[image]):
            height = min(box[2], other[2]) - max(box[0], other[0])
            width = min(box[3], other[3]) - max(box[1], other[1])
            shared = max(height, 0.0) * max(width, 0.0)
            area = sum(max(each[2] - each[0], 0.0) * max(each[3] - each[1], 0.0) for each in (box, other))
            if (overlap := shared / (area - shared)) > best:
                best, place = overlap, number
        hits.append(best >= 0.5 and (image, place) not in taken)
        taken |= {(image, place)} if best >= 0.5 else set()
    count, area, recall = sum(map(len, boxes.values())), 0.0, 0.0
    right = np.cumsum(hits)
    precisions = right / np.arange(1, len(hits) + 1)
    for place, is_right in enumerate(hits):
        if is_right:
            area += precisions[place:].max() / count
            recall += 1 / count
    assert recall <= 1.0
    return area


def test_map_is_the_one_of_numpy(apply: Apply) -> None:
    apply("Detection", "Mean average precision")
    random = np.random.default_rng(1)
    images, count = 60, 12
    classes = random.integers(0, 3, (images, 4))
    corners = random.uniform(0.0, 0.6, (images, 4, 2))
    boxes = np.concatenate([corners, corners + random.uniform(0.2, 0.4, corners.shape)], axis=-1).astype("float32")
    # Near one of the boxes, so that several detections are near the same one. No two scores share a bin.
    found = boxes[np.arange(images)[:, None], random.integers(0, 4, (images, count))]
    found = (found + random.normal(0.0, 0.03, found.shape)).astype("float32")
    scores = (random.permutation(images * count * 2) + 0.5).reshape(images, count, 2) / (images * count * 2)
    scores = np.where(random.uniform(size=scores.shape) < 0.3, 0.0, scores).astype("float32")
    expected = []
    for number in range(2):
        detections = [
            (scores[image, each, number], image, found[image, each])
            for image in range(images)
            for each in range(count)
            if scores[image, each, number] > 0.0
        ]
        expected.append(average_precision(detections, {i: boxes[i][classes[i] == number + 1] for i in range(images)}))
    assert 0.1 < np.mean(expected) < 0.9

    def measured(bins: int) -> float:
        task.BINS = bins
        metric = task.MeanAveragePrecision()
        for some in np.array_split(np.arange(images), 3):
            labels = {"class": tf.constant(classes[some]), "box": tf.constant(boxes[some])}
            metric.update_state(labels, tf.constant(scores[some]), tf.constant(found[some]), tf.ones(len(some)))
        metric.update_state(labels, tf.constant(scores[some]), tf.constant(found[some]), tf.zeros(len(some)))
        return float(metric.result())

    assert measured(images * count * 2) == pytest.approx(np.mean(expected), rel=1e-6)
    assert measured(1000) == pytest.approx(np.mean(expected), abs=0.005)


@pytest.mark.long
def test_boxes_of_any_number_are_padded(apply: Apply, monkeypatch: pytest.MonkeyPatch) -> None:
    apply("Detection", "Mean average precision")
    prepare, losses = task.prepare_example, []
    for pad_to in (None, (1, 2, 4)):

        def prepare_example(features: Any, labels: Any, *, training: bool, seed: tf.Tensor, pad_to=pad_to) -> Any:
            features, labels = prepare(features, labels, training=training, seed=seed)
            if pad_to:
                is_box = labels["class"] > 0
                labels = {name: tf.boolean_mask(each, is_box) for name, each in labels.items()}
            return features, labels

        monkeypatch.setattr(task, "prepare_example", prepare_example)
        build(2, keep_last_batch=True, pad_to=pad_to, **MONITOR)
        losses.append((take_steps(2), train.evaluate_split("validation")))
    assert_close(losses[1], losses[0])


def test_images_are_read_from_files_and_from_bytes(apply: Apply, tmp_path: Path) -> None:
    apply("Detection")
    image = np.random.default_rng(0).integers(0, 256, (8, 8, 1)).astype("uint8")
    content = tf.io.encode_png(image).numpy()
    (tmp_path / "one.png").write_bytes(content)
    images = tf.data.Dataset.from_tensor_slices([str(tmp_path / "one.png"), content]).map(task.read_image)
    for found in images:
        np.testing.assert_array_equal(found, image)


@pytest.mark.long
def test_detection_passes_all_checks_and_division_by_its_own_boxes_does_not(
    apply: Apply, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    apply("Detection", "Mean average precision")
    assert not findings(capsys, tmp_path, **MONITOR)

    def own_boxes(count: Callable[..., tf.Tensor]) -> tf.Tensor:
        from engine.model.step import current_step

        return count(*current_step().batch)

    monkeypatch.setattr(task, "sum_over_batch", own_boxes)
    assert findings(capsys, tmp_path, **MONITOR)


@pytest.mark.long
def test_detector_finds_the_boxes(apply: Apply) -> None:
    """And the mAP of an evaluation on two replicas, with padding, is the one of NumPy."""
    apply("Detection", "Mean average precision", complete=True)
    build(2, epochs=12, global_batch_size=32, evaluation_batch_size=48, **MONITOR)
    before = train.evaluate_split("validation")["validation/map"]
    for epoch in range(12):
        train.train_epoch(epoch)
    found = train.evaluate_split("validation")["validation/map"]
    assert before < 0.1
    assert found > 0.8

    features, labels = next(task.load_examples("validation").batch(128).as_numpy_iterator())
    outputs = {name: each.numpy().astype("float64") for name, each in task.model(features).items()}
    scores = 1.0 / (1.0 + np.exp(-outputs["class"])).reshape(128, 8, 8, 2)
    of_classes = []
    for number in range(2):
        detections = []
        for image, row, column in np.ndindex(128, 8, 8):
            score = scores[image, row, column, number]
            beside = scores[image, max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2, number]
            middle = np.array([row + 0.5, column + 0.5, row + 0.5, column + 0.5])
            if score == beside.max():
                detections.append((score, image, (middle + outputs["box"][image, 8 * row + column]) / 8))
        boxes = {image: labels["box"][image][labels["class"][image] == number + 1] for image in range(128)}
        of_classes.append(average_precision(detections, boxes))
    assert found == pytest.approx(np.mean(of_classes), abs=0.002)
    for stack, first, count in train.batches["validation"].iterator().take(3):
        train.run_steps["validation"](stack, first, count)
    counted = np.asarray(task.metrics["validation"]["map"].boxes.value)
    np.testing.assert_array_equal(counted, [(labels["class"] == number).sum() for number in (1, 2)])
    best = task.predict_step(tf.constant(features))
    order = scores.reshape(128, -1).argmax(axis=1)
    np.testing.assert_allclose(best["score"][:, 0], scores.reshape(128, -1).max(axis=1), rtol=1e-5)
    np.testing.assert_array_equal(best["class"][:, 0], order % 2 + 1)
    assert best["box"].shape == (128, 4, 4)


# --- Speech -----------------------------------------------------------------------------------------------------------


def negative_log_likelihood(logits: np.ndarray, text: list[int]) -> float:
    """By the forward algorithm, in float64."""
    exponents = np.exp(logits - logits.max(axis=-1, keepdims=True))
    likely = exponents / exponents.sum(axis=-1, keepdims=True)
    states = [0] + [each for symbol in text for each in (symbol, 0)]
    alpha = np.zeros(len(states))
    alpha[:2] = likely[0, states[:2]]
    for frame in likely[1:]:
        before = alpha.copy()
        for place, symbol in enumerate(states):
            alpha[place] = before[place] + (before[place - 1] if place else 0.0)
            if place > 1 and symbol not in (0, states[place - 2]):
                alpha[place] += before[place - 2]
        alpha *= frame[states]
    return -np.log(alpha[-2:].sum())


def loss_of_texts(features: dict[str, np.ndarray], labels: np.ndarray) -> float:
    """One text after the other, each without its padding."""
    total = 0.0
    for frames, mask, text in zip(features["frames"], features["mask"], labels, strict=True):
        length = int(mask.sum())
        outputs = task.model({"frames": frames[None, :length], "mask": mask[None, :length]})
        logits = outputs["logits"].numpy().astype("float64")[0]
        total += negative_log_likelihood(logits, [int(symbol) for symbol in text if symbol])
    return total / BATCH


@pytest.mark.long
def test_loss_of_texts_is_one_of_their_frames(apply: Apply) -> None:
    apply("Speech (CTC)")
    assert_losses_are(loss_of_texts)


@pytest.mark.long
def test_speech_passes_all_checks_and_a_mean_of_the_replica_does_not(
    apply: Apply, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    apply("Speech (CTC)")
    assert not findings(capsys, tmp_path)
    compute_loss = task.compute_loss

    def mean_loss(*arguments: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        _, per_example_loss = compute_loss(*arguments)
        return tf.reduce_mean(per_example_loss), per_example_loss

    monkeypatch.setattr(task, "compute_loss", mean_loss)
    assert findings(capsys, tmp_path)


def distance(one: list[int], other: list[int]) -> int:
    row = [*range(len(other) + 1)]
    for symbol in one:
        before, row = row, [row[0] + 1]
        for place, its in enumerate(other):
            row.append(min(before[place] + (symbol != its), before[place + 1] + 1, row[-1] + 1))
    return row[-1]


@pytest.mark.long
def test_texts_are_read(apply: Apply) -> None:
    apply("Speech (CTC)", complete=True)
    build(2, epochs=8, global_batch_size=32)
    before = train.evaluate_split("validation")["validation/symbol_error_rate"]
    for epoch in range(8):
        train.train_epoch(epoch)
    found = train.evaluate_split("validation")["validation/symbol_error_rate"]
    assert before > 0.8
    assert found < 0.1
    errors = symbols = 0
    for features, text in task.load_examples("validation").as_numpy_iterator():
        prepared, _ = task.prepare_example(features, text)
        logits = task.model({name: tf.constant(each)[None] for name, each in prepared.items()})["logits"].numpy()[0]
        best = logits[: features["length"]].argmax(axis=-1)
        read = [int(each) for each, last in zip(best, [0, *best], strict=False) if each and each != last]
        errors += distance(read, [int(each) for each in text if each])
        symbols += np.count_nonzero(text)
    assert found == pytest.approx(errors / symbols, rel=1e-6)


# --- Adapters ---------------------------------------------------------------------------------------------------------


def loss_with_adapters(features: np.ndarray, labels: np.ndarray) -> float:
    hidden = features
    for layer in task.model.layers[:2]:
        hidden = layer(hidden)
    hidden = hidden.numpy().astype("float64")
    first, last = ([each.numpy().astype("float64") for each in layer.variables] for layer in task.model.layers[2:])
    # Kernel, bias and the two matrices.
    hidden = hidden @ (first[0] + first[2] @ first[3]) + first[1]
    hidden = hidden * (1.0 + np.vectorize(math.erf)(hidden / np.sqrt(2.0))) / 2.0
    logits = hidden @ (last[0] + last[2] @ last[3]) + last[1]
    return (np.log(np.exp(logits).sum(axis=-1)) - logits[np.arange(len(labels)), labels]).sum() / BATCH


def trained() -> set[str]:
    return {variable.path.rpartition("/")[2] for variable in task.model.trainable_variables}


def test_only_adapters_are_trained(apply: Apply) -> None:
    apply("Low-rank adapters (LoRA)")
    assert_losses_are(loss_with_adapters, lora_rank=4, learning_rate=0.5)
    assert trained() == {"lora_kernel_a", "lora_kernel_b"}
    before = weights()
    take_steps(2)
    changed = {name.rpartition("/")[2] for name, value in weights().items() if not np.array_equal(value, before[name])}
    assert changed == trained()
    build(1)
    assert trained() == {"kernel", "bias"}


@pytest.mark.long
def test_adapters_pass_all_checks_and_those_of_a_file_of_keras_are_new(
    apply: Apply, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    apply("Low-rank adapters (LoRA)")
    build(1)
    task.model.save(tmp_path / "base.keras")
    assert not findings(capsys, tmp_path, lora_rank=4)
    assert not findings(capsys, tmp_path, lora_rank=4, init_from=tmp_path / "base.keras", init_partial=True)
    build(1, lora_rank=4)
    own, rejected = weights(), "gives 6 of the model's 10 variables .*lora_kernel_.*: --init-partial loads what matches"
    with pytest.raises(BadInput, match=rejected):
        load_initial_weights(tmp_path / "base.keras", task.model, partial=False)
    load_initial_weights(tmp_path / "base.keras", task.model, partial=True)
    assert all(np.array_equal(value, own[name]) for name, value in weights().items() if "lora_" in name)


@pytest.mark.long
def test_biases_start_at_their_step(apply: Apply, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (block,) = [each for each in blocks(RECIPES["Low-rank adapters (LoRA)"]) if "class Config" not in each]
    apply("Low-rank adapters (LoRA)")
    line = "            layer.bias.trainable = False\n"
    assert line in block
    put(block.replace(line, ""), task, monkeypatch, tmp_path)
    late = blocks(sections("gradients.md")["Layers that are frozen until a step"])[0]
    put(late.replace('".*/conv2d.*"', '".*/bias"'), task, monkeypatch, tmp_path)
    # Two steps an epoch; of six steps the first two are without the biases.
    build(2, epochs=3, learning_rate=0.1, keep_last_batch=True, lora_rank=4)
    biases, before = [each for each in task.model.trainable_variables if each.path.endswith("bias")], weights()
    assert len(biases) == 2
    take_steps(2)
    name = next(name for name in before if name.endswith("dense/bias"))
    np.testing.assert_array_equal(weights()[name], before[name])
    take_steps(1, epoch=1)
    assert 0.001 < np.abs(weights()[name] - before[name]).max() < 0.011


@pytest.mark.long
def test_adapters_learn_other_data_and_are_merged_into_the_export(
    apply: Apply, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    apply("Low-rank adapters (LoRA)", complete=True)
    flags = ["--simulated-devices=2", "--epochs=8"]
    train.main([*flags, "--run-dir=base"])
    prepare = task.prepare_example

    def prepare_example(features: tf.Tensor, labels: tf.Tensor, *, training: bool, seed: tf.Tensor) -> Any:
        features, labels = prepare(features, labels, training=training, seed=seed)
        return tf.transpose(features, [1, 0, 2]), labels

    monkeypatch.setattr(task, "prepare_example", prepare_example)
    before = train.main(["--simulated-devices=2", "--run-dir=base", "--evaluate-only"])
    given = ["--lora-rank=4", "--init-from=base", "--init-partial", "--export"]
    found = train.main([*flags, *given, "--run-dir=adapted"])
    assert "6 of the model's 10 variables" in capsys.readouterr().out
    assert found["test/accuracy"] > 2 * before["test/accuracy"]
    loaded = keras.models.load_model("adapted/export/model.keras")
    for layer, its in zip(task.model.layers[2:], loaded.layers[2:], strict=True):
        kernel, _, one, other = (each.numpy() for each in layer.variables)
        np.testing.assert_allclose(its.variables[0].numpy(), kernel + one @ other, atol=1e-6)
        assert np.abs(one @ other).max() > 0.01
    again = train.main([*flags, "--epochs=1", "--learning-rate=1e-9", "--init-from=adapted/export/model.keras"])
    assert again["test/accuracy"] == pytest.approx(found["test/accuracy"], abs=1e-6)
