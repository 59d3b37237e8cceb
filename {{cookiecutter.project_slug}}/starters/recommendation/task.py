"""Your task: its data, its objects, and the steps of one replica on a per-replica batch.

Lines marked TODO(you) are yours to replace; everything works as it is. An edit of a line marked KEEP may give
wrong results without an error.
"""

from collections.abc import Iterable
from pathlib import Path

from config import Config

import keras
import tensorflow as tf

from catalog import Catalog, catalog_files, read_catalog, read_known_items
from engine.data import Records
from engine.errors import BadInput
from engine.model import apply_gradients, gather_batch, places_in_batch
from prepare_data import LABEL, Arguments, K, check_records, check_texts, make_records, read_rows, serialized
from towers import create_ranking_head, create_tower

# The columns of users.jsonl and items.jsonl that the towers use, and the length of the vectors in the table of each. An
# item's column may be a list of texts. To add a column, add it here and to the data, as docs/starter.md shows.
USER_COLUMNS = {"user_id": 32, "country": 8, "age_group": 8}
ITEM_COLUMNS = {"item_id": 32, "category": 8, "tags": 16}

# --- Data -------------------------------------------------------------------------------------------------------------


def catalog() -> Catalog:
    return read_catalog(config.records, tuple(USER_COLUMNS), tuple(ITEM_COLUMNS))


def load_examples(split: str) -> Records:
    """Returns the examples of "train", "validation" or "test": record files, or a tf.data.Dataset of known length.

    A dataset yields single examples, always in the same order. Do not shuffle, repeat or batch: the engine does.
    """
    # TODO(you): Load your examples.
    if config.records == Config.records and not config.records.exists():
        make_records(Arguments())
    if config.best > (items := catalog().items):
        raise BadInput(f"--best {config.best} must be at most the number of items in {config.records}: pass {items}")
    path = config.records / f"{split}.tfrecord"
    check_records(path, {name: catalog().tables[name] for name in USER_COLUMNS})
    return Records(path)


def data_files() -> list[Path]:
    """Returns the files on which results depend besides the examples; a run is rejected with others."""
    return catalog_files(config.records, known_items=config.new_items_only)


def prepare_example(record: tf.Tensor):
    """Decodes one record. Runs in parallel, on the examples that will be used.

    It turns a tf.train.Example (string, scalar) into the numbers of the user's columns, int32 [1] each, and the labels:
    the item's number, int32, and whether the user liked it, float32. A text that is not in the vocabulary becomes 0.
    """
    # TODO(you): Prepare one example.
    text, number = tf.io.FixedLenFeature([], tf.string, ""), tf.io.FixedLenFeature([], tf.int64, 0)
    fields = {**dict.fromkeys((*USER_COLUMNS, "item_id"), text), LABEL: number}
    parsed = tf.io.parse_single_example(record, fields)
    tables = catalog().tables
    features = {name: tf.cast(tables[name].lookup(parsed[name]), tf.int32)[None] for name in USER_COLUMNS}
    item = tf.cast(tables["item_id"].lookup(parsed["item_id"]), tf.int32)
    # A prediction needs no item. Training on an unknown one would move the weights in its direction.
    is_known = (item > 0) | (parsed["item_id"] == "")
    tf.debugging.Assert(is_known, ["items.jsonl has no item_id", parsed["item_id"], ": add it, or remove the record"])
    return features, {"item": item, LABEL: tf.cast(parsed[LABEL], tf.float32)}


def read_inputs(path: Path) -> Iterable[tuple[int | str, bytes]]:
    """Yields a name and the features of each example at `path`, as load_examples returns them; predict.py calls it.

    Change it together with load_examples. Here `path` is a file like users.jsonl, and a user is named by the line's
    number. A column that is missing is unknown.
    """
    for number, (place, row) in enumerate(read_rows(path), start=1):
        if not (given := [name for name in USER_COLUMNS if name in row]):
            raise BadInput(f"{place} has none of the columns {', '.join(USER_COLUMNS)}: give at least one")
        check_texts(row, place, given)
        yield number, serialized({name: row.get(name, "") for name in USER_COLUMNS})


# --- Objects: made once by train.build(), inside strategy.scope(); the steps below use them ---------------------------

config: Config
model: dict[str, keras.Model]
optimizer: keras.optimizers.Optimizer
loss_objects: dict[str, keras.losses.Loss]
metrics: dict[str, dict[str, keras.metrics.Metric]]  # split -> name -> metric


def create_model() -> dict[str, keras.Model]:
    """Returns the model, or a dict of models by name. Here the towers give vectors, and the head a logit."""
    # TODO(you): Build your model.
    found, units = catalog(), config.vector_length
    return {
        "user": create_tower(USER_COLUMNS, dict.fromkeys(USER_COLUMNS, 1), found.sizes, units),
        "item": create_tower(
            ITEM_COLUMNS, {name: found.columns[name].shape[1] for name in ITEM_COLUMNS}, found.sizes, units
        ),
        "ranking": create_ranking_head(units, config.hidden),
    }


def create_optimizer(total_steps: int) -> keras.optimizers.Optimizer:
    """Returns the optimizer, or a dict of them under the models' names. All epochs together have `total_steps`."""
    # TODO(you): Choose the optimizer and the learning rate over time.
    # Adagrad leaves the rows of a table alone that a batch does not use. Adam and weight decay would move all of them.
    schedule = keras.optimizers.schedules.CosineDecay(config.learning_rate, total_steps)
    # The mean over the batch makes a row's gradient small. Beside 0.1, Keras's default, it would hardly move the row.
    return keras.optimizers.Adagrad(schedule, initial_accumulator_value=1e-6)


def create_loss_objects() -> dict[str, keras.losses.Loss]:
    """Returns one loss per term of compute_loss, by name."""
    # TODO(you): Choose the losses; compute_loss combines them.
    # KEEP: reduction="none" gives a value per example; others give one for all, and means are divided by the replicas.
    return {
        "retrieval": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none"),
        "ranking": keras.losses.BinaryCrossentropy(from_logits=True, reduction="none"),
    }


def create_metrics(split: str) -> dict[str, keras.metrics.Metric]:
    """Returns the metrics of "train", "validation" or "test", by name; each split has its own."""
    # TODO(you): Choose the metrics; update_metrics feeds them.
    created = {name: keras.metrics.Mean() for name in ("loss", "retrieval_loss", "ranking_loss")}
    created["auc"] = keras.metrics.AUC(from_logits=True)
    if split != "train":  # Ranking all items in every step of training would take most of its time.
        created |= {"recall_at_10": keras.metrics.Mean(), "ndcg_at_10": keras.metrics.Mean()}
    return created


# --- Steps: what one replica does with a per-replica batch ------------------------------------------------------------


def item_vectors(items: tf.Tensor, *, training: bool) -> tf.Tensor:
    """Returns the vectors (float32, [n, vector_length]) of items by number (int32, [n])."""
    columns = catalog().columns
    return model["item"]({name: tf.gather(columns[name], items) for name in ITEM_COLUMNS}, training=training)


def predict_pairs(features: dict[str, tf.Tensor], items: tf.Tensor, *, training: bool) -> dict[str, tf.Tensor]:
    """Returns the vectors of the users and of their items, [batch, vector_length], and the logits, [batch, 1]."""
    pair = {"user": model["user"](features, training=training), "item": item_vectors(items, training=training)}
    return {**pair, LABEL: model["ranking"](pair, training=training)}


def sampled_softmax(predictions: dict[str, tf.Tensor], items: tf.Tensor, sample_weights: tf.Tensor) -> tf.Tensor:
    """Returns the loss of finding each user's item among the items of the global batch ([batch])."""
    scores = in_batch_scores(predictions["user"], predictions["item"], items, sample_weights)
    return loss_objects["retrieval"](places_in_batch(items), scores)


def in_batch_scores(users: tf.Tensor, vectors: tf.Tensor, items: tf.Tensor, sample_weights: tf.Tensor) -> tf.Tensor:
    """Returns the scores of the global batch's items for each user of this replica, [batch, global batch].

    An item is in a batch the more often, the more frequent it is. The logarithm of its frequency is subtracted, so that
    the softmax estimates the one over all items (Yi et al. 2019). In other places, the user's own item is not an item
    that the user did not choose, so it is masked, and so is padding.
    """
    # KEEP: Of all replicas; with the items of one replica only, results depend on the number of replicas.
    all_items, places = gather_batch(items), places_in_batch(items)
    scores = tf.matmul(users, gather_batch(vectors), transpose_b=True)
    scores -= tf.gather(catalog().log_frequency, all_items)
    is_elsewhere = places[:, None] != tf.range(tf.shape(all_items)[0])
    is_accidental_hit = is_elsewhere & (items[:, None] == all_items)
    is_padding = gather_batch(sample_weights) <= 0.0
    return tf.where(is_accidental_hit | is_padding, -1e9, scores)


def compute_loss(
    labels: dict[str, tf.Tensor], predictions: dict[str, tf.Tensor], retrieval_loss: tf.Tensor, sample_weights
) -> tuple[tf.Tensor, dict[str, tf.Tensor]]:
    """Returns this replica's part of the batch's loss (scalar) and the losses of each example by name ([batch])."""
    ranking_loss = loss_objects["ranking"](labels[LABEL][:, None], predictions[LABEL])
    per_example_loss = config.retrieval_weight * retrieval_loss + config.ranking_weight * ranking_loss
    # KEEP: One value per example; a mean, or [batch, batch], would train without an error but wrongly.
    per_example_loss = tf.ensure_shape(per_example_loss, sample_weights.shape)
    # KEEP: Divided by the global batch size, because the gradients of all replicas are summed.
    loss = tf.nn.compute_average_loss(
        per_example_loss, sample_weight=sample_weights, global_batch_size=config.global_batch_size
    )
    # KEEP: Divided by the number of replicas, because each adds the same regularization loss.
    loss += tf.nn.scale_regularization_loss([each for one in model.values() for each in one.losses])
    return loss, {"loss": per_example_loss, "retrieval_loss": retrieval_loss, "ranking_loss": ranking_loss}


def update_metrics(split: str, labels, predictions, losses: dict[str, tf.Tensor], sample_weights) -> None:
    """Updates the metrics of a split with unscaled values per example and their sample weights."""
    for name, values in losses.items():
        metrics[split][name].update_state(values, sample_weight=sample_weights)
    metrics[split]["auc"].update_state(labels[LABEL][:, None], predictions[LABEL], sample_weight=sample_weights)


def train_step(batch) -> tf.Tensor:
    """Updates the model from a per-replica batch; returns this replica's part of the loss (scalar)."""
    # TODO(you): Change the step, and evaluation_step and predict_step with it.
    features, labels, sample_weights = batch
    with tf.GradientTape() as tape:
        predictions = predict_pairs(features, labels["item"], training=True)
        retrieval_loss = sampled_softmax(predictions, labels["item"], sample_weights)
        loss, losses = compute_loss(labels, predictions, retrieval_loss, sample_weights)
    # KEEP: Sums the gradients over the replicas, then clips, then updates; add no sum or clipping of your own.
    apply_gradients(optimizer, tape, loss, [each for one in model.values() for each in one.trainable_variables])
    update_metrics("train", labels, predictions, losses, sample_weights)
    return loss


def evaluation_step(split: str, batch) -> tf.Tensor:
    """Measures the model on a per-replica batch; returns this replica's part of the loss (scalar)."""
    features, labels, sample_weights = batch
    predictions = predict_pairs(features, labels["item"], training=False)
    # The exact softmax, over all items, does not depend on the batch.
    pair = predictions["user"], predictions["item"]
    retrieval_loss, ranks = compare_with_all(*pair, labels["item"], features["user_id"])
    loss, losses = compute_loss(labels, predictions, retrieval_loss, sample_weights)
    update_metrics(split, labels, predictions, losses, sample_weights)
    is_found = ranks < K
    metrics[split]["recall_at_10"].update_state(is_found, sample_weight=sample_weights)
    # The best possible gain is 1, because one item is relevant.
    gain = tf.where(is_found, tf.math.log(2.0) / tf.math.log(2.0 + ranks), 0.0)
    metrics[split]["ndcg_at_10"].update_state(gain, sample_weight=sample_weights)
    return loss


def compare_with_all(
    users: tf.Tensor, vectors: tf.Tensor, items: tf.Tensor, user_ids: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the loss of finding each user's item among all, and the rank of its score (float32, [batch] each).

    The rank is the number of other items whose score is not smaller, so 0 is the best one. With "is larger" instead, a
    model whose scores are all equal or NaN would be perfect.
    """
    own_scores = tf.reduce_sum(users * vectors, axis=-1)
    log_sums, ranks = tf.fill(tf.shape(own_scores), -float("inf")), tf.zeros_like(own_scores)
    for first in tf.range(1, catalog().items + 1, config.items_at_once):
        block = item_block(first)
        scores = block_scores(users, block, user_ids, items)
        log_sums = tf.reduce_logsumexp(tf.stack([log_sums, tf.reduce_logsumexp(scores, axis=-1)]), axis=0)
        is_before = ~(scores < own_scores[:, None]) & (items[:, None] != block)
        ranks += tf.reduce_sum(tf.cast(is_before, tf.float32), axis=-1)
    return log_sums - own_scores, ranks


def item_block(first: tf.Tensor) -> tf.Tensor:
    """Returns the numbers of --items-at-once items from `first` on, or of those that are left."""
    return tf.range(first, tf.minimum(first + config.items_at_once, catalog().items + 1))


def block_scores(users: tf.Tensor, block: tf.Tensor, user_ids: tf.Tensor, own: tf.Tensor | None = None) -> tf.Tensor:
    """Returns the scores of a block of items for each user, [n, block].

    With --new-items-only an item that the user has in training, and that is not the user's `own` one (int32, [n]), has
    the score -inf. `user_ids` are int32 [n, 1].
    """
    scores = tf.matmul(users, item_vectors(block, training=False), transpose_b=True)
    if not config.new_items_only:
        return scores
    known = tf.gather(read_known_items(config.records, tuple(USER_COLUMNS), tuple(ITEM_COLUMNS)), user_ids[:, 0])
    if own is not None:
        known = tf.where(known == own[:, None], 0, known)
    columns = known - block[0]
    rows = tf.repeat(tf.range(tf.shape(known)[0])[:, None], tf.shape(known)[1], axis=1)
    in_block = (columns >= 0) & (columns < tf.size(block))
    places = tf.boolean_mask(tf.stack([rows, columns], axis=-1), in_block)
    return tf.tensor_scatter_nd_update(scores, places, tf.fill([tf.shape(places)[0]], -float("inf")))


def predict_step(features: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    """Returns the predictions for prepared features, [n, ...] each, by name; --export and predict.py use it.

    Here these are the ids of the --best items (string), the best one first, their scores, the probabilities of liking
    them, all [n, best], and the user's vector, [n, vector_length].
    """
    users = model["user"](features, training=False)
    count = tf.shape(users)[0]
    best_scores, best_items = tf.fill([count, config.best], -float("inf")), tf.zeros([count, config.best], tf.int32)
    for first in tf.range(1, catalog().items + 1, config.items_at_once):
        block = item_block(first)
        scores = block_scores(users, block, features["user_id"])
        candidates = tf.concat([best_items, tf.repeat(block[None], count, axis=0)], axis=1)
        best_scores, places = tf.math.top_k(tf.concat([best_scores, scores], axis=1), config.best)
        best_items = tf.gather(candidates, places, batch_dims=1)
    # Each user, beside each of the best items.
    pairs = {"user": tf.repeat(users, config.best, axis=0)}
    pairs["item"] = item_vectors(tf.reshape(best_items, [-1]), training=False)
    logits = tf.reshape(model["ranking"](pairs, training=False), [count, config.best])
    return {
        "items": tf.gather(catalog().item_ids, best_items),
        "scores": best_scores,
        "liked": tf.nn.sigmoid(logits),
        "user_vector": users,
    }
