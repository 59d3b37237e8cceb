"""What is special to this task; write your own in its place."""

import dataclasses
from pathlib import Path

from config import Config

import keras
import numpy as np
import pytest
import tensorflow as tf

import task
import train
from engine.errors import BadInput
from prepare_data import Arguments, check_pairs, make_records

TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "sat", "down", "."]


def test_learning_rate_is_that_of_the_formula_at_every_step(settings: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    task.config = settings
    monkeypatch.setattr(task, "model", keras.Sequential(), raising=False)
    optimizer = task.create_optimizer(total_steps=50)
    rates = []
    for step in range(51):
        optimizer.iterations.assign(step)
        rates.append(float(optimizer.learning_rate))
    expected = np.interp(range(51), [0, 5, 50], [0.0, settings.learning_rate, 0.0])
    np.testing.assert_allclose(rates, expected, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("replicas", [1, 2])
def test_biases_and_normalizations_have_no_weight_decay(replicas: int, settings: Config) -> None:
    train.build(dataclasses.replace(settings, simulated_devices=replicas))
    model = task.model
    for variable in model.trainable_variables:
        variable.assign(tf.ones_like(variable))
    task.optimizer.iterations.assign(1)  # At step 0 the learning rate is 0.

    def update_without_gradient() -> None:
        task.optimizer.apply_gradients([(tf.zeros(each.shape), each) for each in model.trainable_variables])

    tf.function(lambda: train.strategy.run(update_without_gradient))()
    # Only the decay has changed a weight.
    unchanged = {each.path for each in model.trainable_variables if np.all(each.numpy() == 1)}

    layers = list(model._flatten_layers())
    normalizations = [layer for layer in layers if isinstance(layer, keras.layers.LayerNormalization)]
    biases = [layer.bias for layer in layers if getattr(layer, "bias", None) is not None]
    expected = {each.path for layer in normalizations for each in layer.weights} | {each.path for each in biases}
    assert len(normalizations) == 1 + 2 * settings.layers
    assert len(biases) == 6 * settings.layers + 2
    assert unchanged == expected


@pytest.fixture
def short(settings: Config, tmp_path: Path) -> Config:
    """Settings with records of one pair that fits into 11 tokens, and of one that does not."""
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(TOKENS), encoding="utf-8")
    rows = (
        "label\tsentence1\tsentence2",
        "1\tThe cats sat.\tThe catfish",
        "0\tCats\tthe cat sat down the cat sat down",
    )
    for split in train.SPLITS:
        (tmp_path / f"{split}.tsv").write_text("\n".join(rows), encoding="utf-8")
    records = tmp_path / "records"
    make_records(Arguments(pairs=tmp_path, records=records, vocabulary=vocabulary, sequence_length=11))
    return dataclasses.replace(settings, records=records, vocabulary_size=len(TOKENS), sequence_length=11)


def test_records_hold_the_tokens_of_both_sentences(short: Config) -> None:
    task.config = short
    records = tf.data.TFRecordDataset(task.load_examples("train").paths("train"))
    prepared = [task.prepare_example(record) for record in records]
    tokens = [[TOKENS[token] for token in features["token_ids"]] for features, _ in prepared]
    assert tokens == [
        ["[CLS]", "the", "cat", "##s", "sat", ".", "[SEP]", "the", "[UNK]", "[SEP]", "[PAD]"],
        # The longer sentence has lost its last two tokens.
        ["[CLS]", "cat", "##s", "[SEP]", "the", "cat", "sat", "down", "the", "cat", "[SEP]"],
    ]
    assert [features["padding_mask"].numpy().tolist() for features, _ in prepared] == [[1] * 10 + [0], [1] * 11]
    segments = [[0] * 7 + [1] * 3 + [0], [0] * 4 + [1] * 7]
    assert [features["segment_ids"].numpy().tolist() for features, _ in prepared] == segments
    assert [int(label) for _, label in prepared] == [1, 0]


def test_records_of_other_pairs_are_rejected(short: Config, tmp_path: Path) -> None:
    check_pairs(short.records, tmp_path)
    (tmp_path / "test.tsv").write_text("label\tsentence1\tsentence2\n1\tThe cat.\tThe cats.\n", encoding="utf-8")
    check_pairs(short.records, tmp_path / "others")  # The records are not made of these.
    with pytest.raises(BadInput, match=r"is made of other pairs than .* contains now: remove it"):
        check_pairs(short.records, tmp_path)


def test_padding_changes_no_prediction(settings: Config) -> None:
    train.build(settings)
    features, *_ = next(train.batches["validation"].one_by_one())
    before = task.predict_step(features)["probabilities"].numpy()
    features["token_ids"] = tf.where(features["padding_mask"] == 0, 7, features["token_ids"])
    assert np.any(features["padding_mask"].numpy() == 0)
    np.testing.assert_allclose(task.predict_step(features)["probabilities"].numpy(), before, rtol=1e-5)
    np.testing.assert_allclose(before.sum(axis=-1), 1.0, rtol=1e-5)


def test_logits_are_float32_under_mixed_precision(settings: Config) -> None:
    train.build(dataclasses.replace(settings, precision="mixed_bfloat16"))
    features, *_ = next(train.batches["validation"].one_by_one())
    assert task.predict_step(features)["probabilities"].dtype == tf.float32


def test_inputs_are_read_as_load_examples_returns_them(settings: Config) -> None:
    task.config = settings
    records = list(task.load_examples("test").as_numpy_iterator())  # Only the first ones, see conftest.py.
    inputs = list(task.read_inputs(settings.records / "test.tfrecord"))
    assert inputs[: len(records)] == list(enumerate(records))
