"""What is special to a language model: packed rows, a mean over tokens, perplexity, completions and their cache."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from config import Config

import keras
import numpy as np
import pytest
import tensorflow as tf

import task
import train
from engine.errors import BadInput
from engine.model.step import step_on
from prepare_data import (
    END,
    NO_LABEL,
    VOCABULARY_SIZE,
    Arguments,
    check_texts,
    make_records,
    pack,
    prompt_row,
    read_documents,
    serialized,
)

PROMPTS = ("", "Alice", "The Queen of Hearts", "x" * 100)


@pytest.fixture
def greedy(settings: Config) -> Config:
    """Settings of a small model that always takes the likeliest token."""
    return dataclasses.replace(settings, width=32, temperature=0.0)


def set_random_weights() -> None:
    """Sets large random weights, with which the likeliest token depends on all tokens before."""
    random = np.random.default_rng(0)
    for variable in task.model.trainable_variables:
        variable.assign(random.normal(size=variable.shape, scale=0.5))


def prepared(*rows: dict[str, list[int]]) -> dict[str, tf.Tensor]:
    """Returns the prepared features of rows, [n, sequence_length] each."""
    features = [task.prepare_example(tf.constant(serialized(row)))[0] for row in rows]
    return tf.nest.map_structure(lambda *each: tf.stack(each), *features)


def prompts(*texts: str) -> dict[str, tf.Tensor]:
    return prepared(*(prompt_row(text, task.config.sequence_length) for text in texts))


# --- Data -------------------------------------------------------------------------------------------------------------


def test_documents_are_packed_into_rows_and_labels_are_the_next_tokens() -> None:
    assert list(pack(["abc", "cdefgh", "i"], 6)) == [
        {
            "tokens": [END, *b"abc", *b"h", 0],  # The rest of the second document.
            "documents": [1, 1, 1, 1, 2, 0],
            "positions": [0, 1, 2, 3, 0, 0],
            "labels": [*b"abc", END, END, NO_LABEL],
        },
        {
            "tokens": [END, *b"cdefg"],
            "documents": [1] * 6,
            "positions": [0, 1, 2, 3, 4, 5],
            "labels": [*b"cdefgh"],
        },
        {
            "tokens": [END, *b"i", 0, 0, 0, 0],
            "documents": [1, 1, 0, 0, 0, 0],
            "positions": [0, 1, 0, 0, 0, 0],
            "labels": [*b"i", END] + [NO_LABEL] * 4,
        },
    ]


def test_inputs_are_prompts_and_a_long_one_is_rejected(settings: Config, tmp_path: Path) -> None:
    task.config = dataclasses.replace(settings, sequence_length=8)
    path = tmp_path / "prompts.txt"
    path.write_text("né\n\n1\f\u20286\n", encoding="utf-8")  # Of these, Python's splitlines makes more lines.
    names, records = zip(*task.read_inputs(path), strict=True)
    assert names == (1, 2, 3)
    examples = [task.prepare_example(record) for record in records]
    tokens = [[END, *"né".encode(), *[0] * 4], [END, *[0] * 7], [END, *"1\f\u20286".encode(), 0]]
    assert [features["tokens"].numpy().tolist() for features, _ in examples] == tokens
    documents = [[1] * 4 + [0] * 4, [1] + [0] * 7, [1] * 7 + [0]]
    assert [features["documents"].numpy().tolist() for features, _ in examples] == documents
    assert {label for _, labels in examples for label in labels.numpy()} == {NO_LABEL}
    path.write_text("1234567\n", encoding="utf-8")
    with pytest.raises(
        BadInput, match=r"prompts.txt, line 1: .* has 7 tokens, and --sequence-length 8 leaves room for 6"
    ):
        list(task.read_inputs(path))


# --- Model ------------------------------------------------------------------------------------------------------------


def test_documents_of_a_row_do_not_see_each_other_nor_later_tokens(greedy: Config) -> None:
    train.build(greedy)
    set_random_weights()
    texts = ("first document", "second one")
    (row,) = pack(texts, greedy.sequence_length)
    logits = task.model(prepared(row)).numpy()[0]
    starts, place = (0, len(texts[0]) + 1), 0
    for start, text in zip(starts, texts, strict=True):
        (alone,) = task.model(prepared(*pack([text], greedy.sequence_length))).numpy()
        stop = start + len(text) + 1
        # Its positions, too, are those of a row of its own.
        np.testing.assert_allclose(logits[start:stop], alone[: stop - start], rtol=1e-4, atol=1e-4)
        place = start + 4
        changed = prepared({**row, "tokens": [*row["tokens"][:place], ord("?"), *row["tokens"][place + 1 :]]})
        differs = np.abs(task.model(changed).numpy()[0] - logits).max(axis=-1) > 1e-4
        assert np.flatnonzero(differs).tolist() == list(range(place, stop))


def test_logits_are_float32_under_mixed_precision(greedy: Config) -> None:
    train.build(dataclasses.replace(greedy, precision="mixed_bfloat16"))
    features = prompts(*PROMPTS)
    # Outside a call of the model, Keras casts the weights of the embeddings.
    assert [logits.dtype for logits in (task.model(features), task.model.decode(features)[0])] == [tf.float32] * 2
    assert task.predict_step(features)["completion"].shape == (len(PROMPTS),)


def test_scales_of_normalizations_have_no_weight_decay(settings: Config) -> None:
    train.build(dataclasses.replace(settings, simulated_devices=2))
    task.optimizer.iterations.assign(1)  # At step 0 the learning rate is 0.
    for variable in task.model.trainable_variables:
        variable.assign(tf.ones_like(variable))

    def update_without_gradient() -> None:
        task.optimizer.apply_gradients([(tf.zeros(each.shape), each) for each in task.model.trainable_variables])

    tf.function(lambda: train.strategy.run(update_without_gradient))()
    unchanged = {each.path for each in task.model.trainable_variables if np.all(each.numpy() == 1)}
    norms = [layer for layer in task.model._flatten_layers() if isinstance(layer, keras.layers.RMSNormalization)]
    assert len(norms) == 2 * settings.layers + 1
    assert unchanged == {each.path for norm in norms for each in norm.weights}


# --- Loss and metrics -------------------------------------------------------------------------------------------------


def numpy_losses(labels: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Returns the loss of each token in double precision; NaN without a label."""
    logits = logits.astype(np.float64)
    log_sums = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    found = np.take_along_axis(logits, np.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return np.where(labels >= 0, log_sums - found, np.nan)


@pytest.mark.parametrize(("replicas", "micro_batches"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_loss_is_the_mean_over_the_tokens_of_the_global_batch(
    replicas: int, micro_batches: int, greedy: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare_example: Callable[..., Any] = task.prepare_example

    def without_many_labels(record: tf.Tensor):
        """Leaves each row another number of labels."""
        features, labels = prepare_example(record)
        return features, tf.where(tf.range(len(labels)) < features["tokens"][1] - ord("A"), labels, NO_LABEL)

    monkeypatch.setattr(task, "prepare_example", without_many_labels)
    layout = {"simulated_devices": replicas, "micro_batches": micro_batches}
    train.build(dataclasses.replace(greedy, layers=1, **layout))
    set_random_weights()
    batch = next(train.batches["train"].one_by_one())
    per_replica = [train.strategy.experimental_local_results(each) for each in tf.nest.flatten(batch)]
    features, labels, _ = tf.nest.pack_sequence_as(batch, [np.concatenate(each) for each in per_replica])
    losses = numpy_losses(labels, task.model(features).numpy())
    assert len(set(np.isfinite(losses).sum(axis=1))) > 2
    stack, first, _ = next(train.batches["train"].iterator().take(1))
    (loss,) = train.run_steps["train"](stack, first, 1).numpy()
    assert loss == pytest.approx(np.nanmean(losses), rel=1e-5)


def test_loss_of_a_batch_without_labels_is_zero(settings: Config) -> None:
    train.build(settings)
    labels, weights = tf.fill([2, settings.sequence_length], NO_LABEL), tf.ones([2])
    logits = tf.random.stateless_normal([2, settings.sequence_length, VOCABULARY_SIZE], seed=[0, 0])
    with step_on(({}, labels, weights)):
        assert float(task.compute_loss(labels, logits, weights)[0]) == 0.0


def test_perplexity_is_numpys_for_any_cut_into_batches(settings: Config) -> None:
    train.build(settings)
    random = np.random.default_rng(0)
    labels = random.integers(NO_LABEL, 5, size=(7, 6)).astype("int32")
    logits = random.normal(size=(7, 6, VOCABULARY_SIZE)).astype("float32")
    weights = random.integers(3, size=7).astype("float32")
    token_weights = np.where(labels >= 0, weights[:, None], 0.0)
    expected = np.average(np.nan_to_num(numpy_losses(labels, logits)), weights=token_weights)
    for cut in (1, 5):
        for metric in task.metrics["test"].values():
            metric.reset_state()
        for part in (slice(0, cut), slice(cut, None)):
            some_labels, some_weights = tf.constant(labels[part]), tf.constant(weights[part])
            with step_on(({}, some_labels, some_weights)):
                _, token_losses = task.compute_loss(some_labels, tf.constant(logits[part]), some_weights)
            task.update_metrics("test", some_labels, token_losses, some_weights)
        results = {name: float(metric.result()) for name, metric in task.metrics["test"].items()}
        assert results == pytest.approx({"loss": expected, "perplexity": np.exp(expected)}, rel=1e-5)


# --- Completions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("texts", [PROMPTS, PROMPTS[2:]], ids=["from the start", "from the shortest prompt"])
def test_completions_with_a_cache_are_those_without(texts: tuple[str, ...], greedy: Config) -> None:
    train.build(greedy)
    set_random_weights()
    length = greedy.sequence_length
    for prompt, completion in zip(texts, task.predict_step(prompts(*texts))["completion"].numpy(), strict=True):
        tokens = [END, *prompt.encode(), *completion, END][:length]
        row = {**prompt_row("", length), "tokens": tokens, "documents": [1] * len(tokens)}
        row = {name: (values + [0] * length)[:length] for name, values in row.items()} | {"positions": range(length)}
        likeliest = tf.argmax(task.model(prepared(row))[0], axis=-1).numpy()
        assert completion
        assert likeliest[len(prompt) : len(tokens) - 1].tolist() == tokens[len(prompt) + 1 :]


def test_completions_follow_from_the_prompt_and_the_seed_alone(settings: Config) -> None:
    train.build(dataclasses.replace(settings, width=32, temperature=1.0))

    def completions(*texts: str) -> list[bytes]:
        return task.predict_step(prompts(*texts))["completion"].numpy().tolist()

    together = completions(*PROMPTS)
    assert len(set(together)) == len(PROMPTS)
    assert [completions(text)[0] for text in PROMPTS] == together
    assert completions(*reversed(PROMPTS)) == together[::-1]
    task.config = dataclasses.replace(task.config, seed=1)
    assert not set(completions(*PROMPTS)) & set(together)


def test_nothing_is_written_after_the_end(greedy: Config) -> None:
    train.build(greedy)
    for variable in task.model.trainable_variables:
        variable.assign(tf.zeros_like(variable))
    # Now END is followed by "a", and "a" by END.
    embeddings = np.zeros([VOCABULARY_SIZE, greedy.width])
    embeddings[END], embeddings[ord("a")] = 1.0, -1.0
    task.model.embedding.embeddings.assign(embeddings)
    task.model.norm.scale.assign(-np.ones(greedy.width))
    # The second row is continued later than the first.
    assert task.predict_step(prompts("", "bba"))["completion"].numpy().tolist() == [b"a", b""]


def test_samples_and_speed_are_reported_after_an_epoch(
    settings: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train.build(dataclasses.replace(settings, width=32))
    for _ in range(2):  # A resumed run writes its last epoch's samples again.
        task.on_report({"epoch": 7, "step": 3, "examples_per_second": 100.0}, tmp_path, task.config)
    (path,) = (tmp_path / "samples").iterdir()
    texts = path.read_text(encoding="utf-8").split("\n\n---\n\n")
    assert [text.startswith(prompt) for text, prompt in zip(texts, task.PROMPTS, strict=True)] == [True] * 3
    assert f"{100 * settings.sequence_length:,} tokens/s, MFU " in capsys.readouterr().out


def test_records_of_other_texts_are_rejected(tmp_path: Path) -> None:
    texts, records = tmp_path / "texts", tmp_path / "records"
    texts.mkdir()
    (texts / "train.txt").write_text("  Indented.\n\n\nAnother one.\n", encoding="utf-8-sig")
    assert read_documents(texts / "train.txt") == ["  Indented.", "Another one."]
    make_records(Arguments(texts=texts, records=records))
    check_texts(records, texts)
    (texts / "train.txt").write_text("Changed.", encoding="utf-8")
    check_texts(records, tmp_path / "others")  # The records are not made of these.
    with pytest.raises(BadInput, match=r"is made of other texts than .* contains now: remove it"):
        check_texts(records, texts)
