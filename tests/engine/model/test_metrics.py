"""Metrics of every kind, also arrays and dictionaries: a name for each number, the same on any number of replicas."""

from types import SimpleNamespace
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
from engine.cluster import parameter_servers
from engine.errors import BadInput
from engine.model import sum_over_batch
from engine.model.metrics import LARGEST_SHOWN, ResultNames, metric_results
from engine.model.rejections import monitor_direction
from engine.model.sums import sum_in_float64


class Total(keras.metrics.Metric):
    """The sum of the predictions; its result is the variable itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.total = self.add_variable(shape=(), initializer="zeros", name="total", **options)

    def update_state(self, labels, predictions, sample_weight=None):
        self.total.assign_add(tf.reduce_sum(predictions * sample_weight[:, None]))

    def result(self):
        return self.total


class TotalOfTensorFlow(Total):
    """Has a variable of TensorFlow's own, and says so."""

    def __init__(self) -> None:
        keras.metrics.Metric.__init__(self)
        on_read = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.SUM}
        self.total = tf.Variable(0.0, trainable=False, name="total", **on_read)

    @property
    def variables(self):
        return [self.total]


class Scores(keras.metrics.Metric):
    """Counts how often each class [10] is taken for each [10]; a dictionary of a number, an array, and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = self.add_variable(shape=(10, 10), initializer="zeros", name="counts")

    def update_state(self, labels, predictions, sample_weight=None):
        chosen = tf.one_hot(tf.argmax(predictions, axis=-1), 10)
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
    "variable": Total,
    "tensorflow": TotalOfTensorFlow,
    "constant": lambda: Fixed(0.25),
    "r2": keras.metrics.R2Score,  # Makes one of its variables with the first update.
    "f1": lambda: keras.metrics.F1Score(average=None),
    "scores": Scores,
}
SETS = {"few": slice(0, 45), "fewer": slice(45, 60)}


def with_metrics(monkeypatch: pytest.MonkeyPatch, metrics: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Makes a task of two validation sets with these metrics; returns its images and labels."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16

    def load_examples(split: str) -> Any:
        several = {
            name: tf.data.Dataset.from_tensor_slices((images[each], labels[each])) for name, each in SETS.items()
        }
        return {"train": several["few"], "validation": several, "test": None}[split]

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

    def create_metrics(split: str) -> dict[str, keras.metrics.Metric]:
        created = {} if split == "test" else metrics
        return {"loss": keras.metrics.Mean(), **{name: create() for name, create in created.items()}}

    monkeypatch.setattr(task, "create_metrics", create_metrics)
    monkeypatch.setattr(task, "update_metrics", update_metrics)
    monkeypatch.setattr(task, "compute_loss", compute_loss)
    monkeypatch.setattr(task, "load_examples", load_examples)
    monkeypatch.setattr(task, "prepare_example", lambda features, labels: (features, labels))
    monkeypatch.setattr(task, "create_model", linear_model)
    return images, labels


def test_metrics_of_every_kind_agree_on_one_replica_and_on_two_and_with_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = with_metrics(monkeypatch, METRICS)
    results = []
    for replicas, size in ((1, None), (2, 50)):
        settings = {"monitor": "validation/few/f1/3", "global_batch_size": 20, "evaluation_batch_size": size}
        train.build(Config(simulated_devices=replicas, **settings))
        assert task.optimizer.iterations.numpy() == 0  # The step that built metrics was undone.
        results.append(train.validate())
        assert train.run.objects.monitor_direction == "max"  # As Keras says of F1.
    assert results[1] == pytest.approx(results[0], rel=1e-5)
    assert train.validate() == results[1]  # They were reset.
    own = train.run.checkpoints.state.per_replica
    assert "metrics/train/r2/r2_score/sum" in own
    assert any(name.startswith("metrics/train/tensorflow/total") for name in own)

    for name, each in SETS.items():
        found = task.model(images[each]).numpy().argmax(axis=-1)
        counts = np.zeros([10, 10])
        np.add.at(counts, (labels[each], found), 1)
        right, all_found, all_of_class = np.diag(counts), counts.sum(axis=0), counts.sum(axis=1)
        f1 = 2 * right / np.maximum(1, all_found + all_of_class)
        expected = {f"scores/counted/{row}/{column}": counts[row, column] for row in range(10) for column in range(10)}
        expected |= {f"f1/{number}": f1[number] for number in range(10)}
        expected |= {"scores/right": right.sum()}
        expected |= {f"scores/by_class/right/{number}": right[number] for number in range(10)}
        # Each example's probabilities add up to one.
        expected |= {"constant": 0.25, **dict.fromkeys(["variable", "tensorflow"], len(found))}
        of_set = {
            key.removeprefix(f"validation/{name}/"): value
            for key, value in results[0].items()
            if key.startswith(f"validation/{name}/") and not key.endswith(("/loss", "/r2"))
        }
        assert of_set == pytest.approx(expected, rel=1e-5)


def test_metric_that_cannot_be_read_on_two_replicas_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_metrics(monkeypatch, {"total": lambda: Total(aggregation="none")})
    with pytest.raises(BadInput, match=r"task.create_metrics\('train'\) returned 'total', whose variable total/total"):
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
    assert results.items() >= {**of_class, **recall}.items()
    assert len(results) == 3 + 3 + LARGEST_SHOWN + 2
    assert results["validation/b/large/1/16"] == 0.0
    # An own column is no metric of the task's, and is shown.
    assert names.lines({"epoch": 1, **results, "validation/b/own": 2.0}) == {
        "epoch": 1,
        **recall,
        "validation/b/own": 2.0,
    }
    assert names.scalars(results) == {**of_class, **recall}
    assert [names.metric(each) for each in ("validation/b/scores/recall", "validation/a/own", "train/loss", "own")] == [
        *("scores/recall", "own", "loss", "own")
    ]
    assert [names.dataset(each) for each in ("validation/a/own", "train/loss", "validation/c/loss", "step")] == [
        *("validation/a", "train", "", "")
    ]
    assert monitor_direction(names, "validation/a/per_class_loss/2", "auto") == "min"
    with pytest.raises(BadInput) as refused:
        monitor_direction(names, "validation/per_class_loss/2", "auto")
    of_set = [["per_class_loss/0", "per_class_loss/2"], ["large/0/0", "large/1/16"], ["scores/recall"]]
    of_set += [["scores/by/class/0", "scores/by/class/1"]]
    expected = [" … ".join(f"validation/{each}/{name}" for name in ends) for each in "ab" for ends in of_set]
    expected = ["train/loss", *expected]
    assert str(refused.value) == (
        f"--monitor validation/per_class_loss/2 is not the name of a metric: use one of {', '.join(expected)}"
    )
    with pytest.raises(BadInput, match=r"not measured, because task.load_examples\('validation'\) returned None: use"):
        monitor_direction(ResultNames(metrics, ["train"]), "validation/loss", "min")


def test_direction_is_the_one_that_keras_knows() -> None:
    metrics = {
        "loss": keras.metrics.Mean(),
        "mae": keras.metrics.MeanAbsoluteError(),
        "accuracy": keras.metrics.SparseCategoricalAccuracy(),
        "anything": keras.metrics.AUC(),
        "wer": keras.metrics.Mean(),
    }
    names = ResultNames({"validation": metrics}, ["validation"])
    assert [monitor_direction(names, f"validation/{name}", "auto") for name in list(metrics)[:4]] == [
        *("min", "min", "max", "max")
    ]
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
        ({"a": np.zeros(6000), "b": np.zeros(6000)}, "whose result has 12,000 numbers"),
        (
            {"a": {"b": tf.constant("text")}},
            "returned 'one', whose result cannot be read (of type EagerTensor): it must be a number, an array",
        ),
        (None, "whose result cannot be read (of type NoneType)"),
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


def test_counts_of_several_workers_are_added_in_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with parameter servers, whose workers change the same variables without waiting for each other."""

    def assignments() -> set[str]:
        mean, optimizer = keras.metrics.Mean(), keras.optimizers.SGD(0.1)
        weight = keras.Variable([1.0])
        optimizer.build([weight])

        @tf.function
        def step() -> None:
            mean.update_state([1.0, 2.0], sample_weight=[1.0, 0.0])
            optimizer.apply([tf.constant([0.5])])

        kinds = {each.type for each in step.get_concrete_function().graph.get_operations()}
        step()
        assert (float(mean.result()), int(optimizer.iterations)) == (1.0, 1)
        return {each for each in kinds if each.startswith("Assign")}

    sum_in_float64()  # The metric's sums are added in one operation in any case.
    # For the optimizer's count, Keras reads, adds and writes: between the two, another worker's count is lost.
    assert assignments() == {"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"}
    monkeypatch.setattr(keras.Variable, "assign_add", keras.Variable.assign_add)  # So that it is restored.
    for name in ("_wait_until_free", "_wait_until_listening", "_end_if_frozen"):
        monkeypatch.setattr(parameter_servers, name, lambda *_: None)
    monkeypatch.setattr(parameter_servers, "start_tensorflow", lambda _, timeout, start: start())
    monkeypatch.setattr(tf.distribute, "ParameterServerStrategy", lambda _: SimpleNamespace(extended=SimpleNamespace()))
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"chief": ["a:1"]}, "task": {"type": "chief", "index": 0}}')
    parameter_servers.coordinate(SimpleNamespace(others=list), timeout=1.0)
    assert assignments() == {"AssignAddVariableOp", "AssignSubVariableOp"}
