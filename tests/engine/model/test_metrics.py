"""Metrics of every kind, also arrays and dictionaries: a name for each number, the same on any number of replicas."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits
from small import linear_model

import task
import train
from config import Config
from engine.cluster.strategy import create_strategy
from engine.errors import BadInput
from engine.model import sum_over_batch
from engine.model.metrics import LARGEST_SHOWN, PythonMetric, ResultNames, drifting, in_float64, metric_results
from engine.model.rejections import monitor_direction
from engine.model.variables import add_in_one_operation
from engine.tracing import operations_of


class Total(keras.metrics.Metric):
    """The sum of the predictions; its result is the variable itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.total = self.add_variable(shape=(), initializer="zeros", name="total", **options)

    def update_state(self, labels, predictions, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(predictions * sample_weight[:, None]))

    def result(self):
        return self.total


class Scores(keras.metrics.Metric):
    """Counts how often each class [10] is taken for each [10]; a dictionary of a number, an array, and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = self.add_variable(shape=(10, 10), initializer="zeros", name="counts")
        self.updates = self.add_variable(shape=(2,), initializer="zeros", name="updates")

    def update_state(self, labels, predictions, sample_weight=None):
        chosen = tf.one_hot(tf.argmax(predictions, axis=-1), 10)
        self.updates.assign_add(1.0)
        self.counts.assign(self.counts + tf.einsum("nc,np,n->cp", labels, chosen, sample_weight))

    def result(self):
        right = tf.linalg.diag_part(tf.convert_to_tensor(self.counts))
        return {"right": tf.reduce_sum(right), "by_class": {"right": right}, "counted": self.counts}


class Fixed(keras.metrics.Metric):
    """Its result is what it is given."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def update_state(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    def result(self):
        return self.value


METRICS = {
    "loss": keras.metrics.Mean,
    "total": Total,
    "constant": lambda: Fixed(0.25),
    "r2": keras.metrics.R2Score,  # Makes one of its variables with the first update.
    "f1": lambda: keras.metrics.F1Score(average=None),
    "scores": Scores,
}
SETS = {"few": slice(0, 45), "fewer": slice(45, 60)}


def test_metrics_of_every_kind_agree_on_one_replica_and_on_two_and_with_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16

    def load_examples(split: str) -> Any:
        sets = {name: tf.data.Dataset.from_tensor_slices((images[each], labels[each])) for name, each in SETS.items()}
        return {"train": sets["few"], "validation": sets, "test": None}[split]

    def compute_loss(labels: tf.Tensor, predictions: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # Metrics that are built late need a first step, outside the compiled ones, which also has such sums.
        losses = keras.losses.sparse_categorical_crossentropy(labels, predictions, from_logits=True)
        count = sum_over_batch(lambda features, labels, sample_weights: tf.reduce_sum(sample_weights))
        return tf.math.divide_no_nan(tf.reduce_sum(losses * weights), count), losses

    def update_metrics(split, labels, predictions, per_example_loss, weights) -> None:
        loss, *others = task.metrics[split].values()
        loss.update_state(per_example_loss, sample_weight=weights)
        for metric in others:
            metric.update_state(tf.one_hot(labels, 10), tf.nn.softmax(predictions), sample_weight=weights)

    monkeypatch.setattr(task, "create_metrics", lambda split: {name: create() for name, create in METRICS.items()})
    monkeypatch.setattr(task, "update_metrics", update_metrics)
    monkeypatch.setattr(task, "compute_loss", compute_loss)
    monkeypatch.setattr(task, "load_examples", load_examples)
    monkeypatch.setattr(task, "prepare_example", lambda features, labels: (features, labels))
    monkeypatch.setattr(task, "create_model", linear_model)
    results = []
    for replicas, size in ((1, None), (2, 50)):
        settings = {"monitor": "validation/few/f1/3", "global_batch_size": 20, "evaluation_batch_size": size}
        train.build(Config(simulated_devices=replicas, **settings))
        assert task.optimizer.iterations.numpy() == 0  # The step that built metrics was undone.
        results.append(train.evaluate_split("validation"))
        assert train.run.objects.monitor_direction == "max"  # As Keras says of F1.
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert train.evaluate_split("validation") == results[1]  # They were reset.
    assert "metrics/train/r2/r2_score/sum" in train.run.checkpoints.state.per_replica
    operations = operations_of(train.run_steps["validation"].graph())
    assert "AssignAddVariableOp" in {operation.type for operation in operations}

    for name, each in SETS.items():
        found = task.model(images[each]).numpy().argmax(axis=-1)
        counts = np.zeros([10, 10])
        np.add.at(counts, (labels[each], found), 1)
        right, all_found, all_of_class = np.diag(counts), counts.sum(axis=0), counts.sum(axis=1)
        f1 = 2 * right / np.maximum(1, all_found + all_of_class)
        expected = {f"scores/counted/{row}/{column}": counts[row, column] for row in range(10) for column in range(10)}
        expected |= {f"f1/{number}": f1[number] for number in range(10)}
        expected |= {f"scores/by_class/right/{number}": right[number] for number in range(10)}
        # Each example's probabilities add up to one.
        expected |= {"scores/right": right.sum(), "constant": 0.25, "total": len(found)}
        of_set = {
            key.removeprefix(f"validation/{name}/"): value
            for key, value in results[0].items()
            if key.startswith(f"validation/{name}/") and not key.endswith(("/loss", "/r2"))
        }
        assert of_set == pytest.approx(expected, rel=1e-5)


def test_metric_that_cannot_be_read_on_two_replicas_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "create_metrics", lambda split: {"total": Total(aggregation="none")})
    with pytest.raises(
        BadInput, match=r"task.create_metrics\('train'\) returned 'total', whose result cannot be read \("
    ):
        train.build(Config(simulated_devices=2, global_batch_size=20))


def test_results_are_named_and_sorted_by_where_they_are_shown() -> None:
    metrics = {
        "train": {"loss": Fixed(1.0)},
        "validation": {
            "per_class_loss": Fixed(np.arange(3.0)),
            "large": Fixed([[0.0] * (LARGEST_SHOWN // 2 + 1)] * 2),
            "scores": Fixed({"recall": np.float32(0.5), "by": {"class": tf.constant([1, 2])}}),
        },
    }
    names = ResultNames(metrics, ["train", "validation/a", "validation/b"])
    results = metric_results(metrics, "validation/b")
    of_class = {f"validation/b/per_class_loss/{number}": float(number) for number in range(3)}
    of_class |= {"validation/b/scores/by/class/0": 1.0, "validation/b/scores/by/class/1": 2.0}
    recall = {"validation/b/scores/recall": 0.5}
    assert results.items() >= {**of_class, **recall, "validation/b/large/1/16": 0.0}.items()
    assert len(results) == 3 + 3 + LARGEST_SHOWN + 2
    # An own column is no metric of the task's, and is shown.
    shown = {"epoch": 1, **recall, "validation/b/own": 2.0}
    assert names.lines({**shown, **results}) == shown
    assert names.scalars(results) == {**of_class, **recall}
    parts = {
        "validation/b/scores/recall": ("validation/b", "scores/recall"),
        "validation/a/own": ("validation/a", "own"),
    }
    for name, expected in {**parts, "train/loss": ("train", "loss"), "own": ("", "own")}.items():
        assert (names.dataset(name), names.metric(name)) == expected
    assert monitor_direction(names, "validation/a/per_class_loss/2", "auto") == "min"
    elements = "per_class_loss/0 … validation/a/per_class_loss/2, validation/a/large/0/0 … validation/a/large/1/16,"
    line = f"is not a result of .*: use one of train/loss, validation/a/{elements} validation/a/scores/recall,"
    with pytest.raises(BadInput, match=f"^--monitor validation/per_class_loss/2 {line}"):
        monitor_direction(names, "validation/per_class_loss/2", "auto")
    with pytest.raises(BadInput, match=r"the datasets of task.load_examples: use one of train/loss$"):
        monitor_direction(ResultNames(metrics, ["train"]), "validation/loss", "min")


def test_direction_is_the_one_that_keras_knows() -> None:
    directions = {
        "loss": (keras.metrics.Mean(), "min"),
        "mae": (keras.metrics.MeanAbsoluteError(), "min"),
        "accuracy": (keras.metrics.SparseCategoricalAccuracy(), "max"),
        "wer": (keras.metrics.Mean(), None),
    }
    metrics = {name: metric for name, (metric, _) in directions.items()}
    names = ResultNames({"validation": metrics}, ["validation"])
    for name, (_, direction) in directions.items():
        assert direction is None or monitor_direction(names, f"validation/{name}", "auto") == direction
    assert monitor_direction(names, "validation/wer", "max") == "max"
    line = "--monitor validation/wer: whether lower or higher is better is unknown: pass --monitor-direction min or max"
    with pytest.raises(BadInput, match=line):
        monitor_direction(names, "validation/wer", "auto")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (
            np.zeros([100, 101]),
            "returned 'one', whose result has 10,100 numbers: at most 10,000 can be columns of metrics.csv",
        ),
        (
            {"a": {"b": tf.constant("text")}},
            "returned 'one', whose result cannot be read (of type EagerTensor): it must be a number, an array",
        ),
        ({"a/b": 1.0, "a": {"b": 2.0}}, "returned two results called one/a/b: rename the metric 'one'"),
        ([[1.0, 2.0], [3.0]], "whose result cannot be read (setting an array element with a sequence"),
    ],
)
def test_result_that_cannot_be_written_is_refused(value: Any, reason: str) -> None:
    with pytest.raises(BadInput) as refused:
        ResultNames({"test": {"one": Fixed(value)}}, ["test"])
    assert reason in str(refused.value)
    assert str(refused.value).startswith("task.create_metrics('test') returned ")
    ResultNames({"test": {"one": Fixed(np.zeros([25, 40]))}}, ["test"])


def test_counts_are_added_in_one_operation() -> None:
    """Between Keras's reading and assigning, another worker of parameter servers loses its count."""
    mean, optimizer = keras.metrics.Mean(), keras.optimizers.SGD(0.1)
    optimizer.build([keras.Variable([1.0])])

    def assignments() -> set[str]:
        @tf.function
        def step() -> None:
            mean.update_state([1.0, 2.0], sample_weight=[1.0, 0.0])
            optimizer.apply([tf.constant([0.5])])

        kinds = {operation.type for operation in step.get_concrete_function().graph.get_operations()}
        step()
        return {kind for kind in kinds if kind.startswith("Assign")}

    assert assignments() == {"AssignVariableOp", "AssignSubVariableOp"}
    add_in_one_operation([*mean.variables, *optimizer.variables])
    assert assignments() == {"AssignAddVariableOp", "AssignSubVariableOp"}
    mean.update_state([1.0, 2.0], sample_weight=[1.0, 0.0])  # Outside of the replicas.
    assert (float(mean.count), float(mean.result()), int(optimizer.iterations)) == (3.0, 1.0, 2)


# --- Sums in float64: as right after ten million examples as after ten ------------------------------------------------

BATCHES, BATCH, STEPS, REPLICAS = 5, 4_000, 2_500, 4


class Assigned(keras.metrics.Metric):
    """The mean of the values. It adds as Keras's Precision does, and as Keras's Mean does."""

    def __init__(self) -> None:
        super().__init__()
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_weight(shape=(), initializer="zeros", name="count")

    def update_state(self, values: tf.Tensor, sample_weight: tf.Tensor) -> None:
        self.total.assign(self.total + tf.reduce_sum(values * sample_weight))
        self.count.assign_add(tf.reduce_sum(sample_weight))

    def result(self) -> tf.Tensor:
        return tf.math.divide_no_nan(self.total, self.count)


def summing_metrics() -> dict[str, keras.metrics.Metric]:
    return {
        "loss": keras.metrics.Mean(),
        "accuracy": keras.metrics.SparseCategoricalAccuracy(),
        "recall": keras.metrics.Recall(),
        "assigned": Assigned(),
    }


def test_metrics_without_sums_in_float64_are_named() -> None:
    class OfTensorFlow(Assigned):
        variables = (tf.Variable(0.0),)

    with in_float64():
        counts = keras.metrics.MeanIoU(10, dtype="int32")
        metrics = {"train": summing_metrics(), "test": {**summing_metrics(), "iou": counts, "own": OfTensorFlow()}}
    assert drifting(metrics) == ["iou (int32)", "own (float32)"]


def test_long_pass_gives_the_means_of_numpy() -> None:
    random = np.random.default_rng(0)
    values = np.full((BATCHES, BATCH), 2.3025851, "float32")
    values[1:] *= 2
    labels, logits = random.integers(0, 3, (BATCHES, BATCH)), random.random((BATCHES, BATCH, 3), np.float32)
    weights = np.ones((BATCHES, BATCH), "float32")
    weights[0, 0] = 2.0**30  # In float32, most of what is added to this is rounded away.

    settings = Config(simulated_devices=REPLICAS)
    strategy = create_strategy(settings)
    with strategy.scope(), in_float64():
        metrics = summing_metrics()
    stacks = [tf.constant(each) for each in (values, labels, logits, weights)]

    def update(index: tf.Tensor) -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        values, labels, logits, weights = [stack[index][replica::REPLICAS] for stack in stacks]
        metrics["loss"].update_state(values, sample_weight=weights)
        metrics["accuracy"].update_state(labels, logits, sample_weight=weights)
        metrics["recall"].update_state(tf.ones_like(values), logits[:, 0], sample_weight=weights)
        metrics["assigned"].update_state(values, sample_weight=weights)

    @tf.function
    def take() -> None:
        for step in tf.range(STEPS):
            strategy.run(update, args=(step % BATCHES,))

    take()
    means = {
        "loss": values,
        "accuracy": logits.argmax(-1) == labels,
        "recall": logits[..., 0] > 0.5,
        "assigned": values,
    }
    expected = {name: np.average(each.astype("float64"), weights=weights) for name, each in means.items()}
    found = metric_results({"validation": metrics}, "validation")
    assert found == pytest.approx({f"validation/{name}": each for name, each in expected.items()}, rel=1e-6)


def test_function_of_a_metric_must_return_a_number() -> None:
    assert PythonMetric(lambda: np.ones(()) / 4).result() == 0.25
    for value in ([0.5, 1.0], {"a": 1.0}, None):
        with pytest.raises(BadInput, match=r"the function of PythonMetric 'score' returned .*: return one number"):
            PythonMetric(lambda value=value: value, name="score").result()
