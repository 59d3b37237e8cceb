"""A decoder-only transformer: rotary positions, tied embeddings, and a cache of keys and values for completions."""

from typing import Any

import keras
import tensorflow as tf
from keras import ops

Cache = tuple[tf.Tensor, tf.Tensor]  # A block's keys and values for all places of a row, [batch, length, heads, size].


def rotate(vectors: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
    """Rotates vectors [batch, length, heads, size] by angles proportional to their positions [batch, length].

    The product of a rotated query and a rotated key depends on the distance of their positions (Su et al. 2021,
    arXiv:2104.09864, equation 34). Keras has no such layer.
    """
    half = vectors.shape[-1] // 2
    frequencies = 10_000.0 ** (-ops.arange(half, dtype="float32") / half)
    angles = ops.cast(positions, "float32")[:, :, None, None] * frequencies
    cosine, sine = (ops.cast(each, vectors.dtype) for each in (ops.cos(angles), ops.sin(angles)))
    first, second = vectors[..., :half], vectors[..., half:]
    return ops.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)


@keras.saving.register_keras_serializable()
class Block(keras.layers.Layer):
    """Attention and a feed-forward layer, each added to its normalized inputs."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.width, self.heads, self.rate = width, heads, dropout
        self.norms = [keras.layers.RMSNormalization(dtype=self.dtype_policy) for _ in range(2)]
        self.query_key_value = keras.layers.Dense(3 * width, use_bias=False, dtype=self.dtype_policy)
        self.joined = keras.layers.Dense(width, use_bias=False, dtype=self.dtype_policy)
        self.wide = keras.layers.Dense(4 * width, activation="gelu", use_bias=False, dtype=self.dtype_policy)
        self.narrow = keras.layers.Dense(width, use_bias=False, dtype=self.dtype_policy)
        self.dropout = keras.layers.Dropout(dropout, dtype=self.dtype_policy)

    def build(self, inputs_shape: Any) -> None:
        for layer in (*self.norms, self.query_key_value, self.joined, self.wide):
            layer.build((None, None, self.width))
        self.narrow.build((None, None, 4 * self.width))

    def call(self, inputs, positions, mask, cache=None, place=None, training=None) -> tuple[tf.Tensor, Cache]:
        """Returns the outputs [batch, length, width], and the keys and values.

        `positions` is [batch, length], and `mask` [batch, length, keys] is True where a token sees a key. With a cache,
        the inputs are the tokens from `place` on, whose keys and values replace those in the cache.
        """
        shape = (*ops.shape(inputs)[:2], self.heads, self.width // self.heads)
        parts = ops.split(self.query_key_value(self.norms[0](inputs)), 3, axis=-1)
        query, key, value = (ops.reshape(part, shape) for part in parts)
        query, key = rotate(query, positions), rotate(key, positions)
        if cache is not None:
            key = ops.slice_update(cache[0], (0, place, 0, 0), key)
            value = ops.slice_update(cache[1], (0, place, 0, 0), value)
        attended = ops.dot_product_attention(query, key, value, mask=mask[:, None])
        attended = self.joined(ops.reshape(attended, ops.shape(inputs)))
        hidden = inputs + self.dropout(attended, training=training)
        fed_forward = self.narrow(self.wide(self.norms[1](hidden)))
        return hidden + self.dropout(fed_forward, training=training), (key, value)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "width": self.width, "heads": self.heads, "dropout": self.rate}


@keras.saving.register_keras_serializable()
class Transformer(keras.Model):
    """Returns logits for the next token of each token, float32 [batch, length, vocabulary_size].

    Takes tokens, documents and positions, int32 [batch, length], by name. A token sees the tokens before it in its
    document, and itself.
    """

    def __init__(
        self, vocabulary_size: int, end: int, layers: int, width: int, heads: int, dropout: float = 0.0, **options: Any
    ) -> None:
        """`end` is the token that ends a document."""
        super().__init__(**options)
        self.sizes: dict[str, Any] = {"layers": layers, "width": width, "heads": heads, "dropout": dropout}
        self.sizes |= {"vocabulary_size": vocabulary_size, "end": end}
        self.end = end
        # The weights of the embeddings compute the logits too. These are float32 under mixed precision.
        self.embedding = keras.layers.ReversibleEmbedding(
            vocabulary_size,
            width,
            embeddings_initializer=keras.initializers.RandomNormal(stddev=0.02),
            reverse_dtype="float32",
        )
        self.blocks = [Block(width, heads, dropout) for _ in range(layers)]
        self.norm = keras.layers.RMSNormalization()

    def build(self, input_shape: Any) -> None:
        self.embedding.build(None)
        for block in self.blocks:
            block.build((None, None, self.sizes["width"]))
        self.norm.build((None, None, self.sizes["width"]))

    def call(self, features: dict[str, tf.Tensor], training=None) -> tf.Tensor:
        return self.decode(features, training=training)[0]

    def decode(self, features: dict[str, tf.Tensor], training=None) -> tuple[tf.Tensor, list[Cache]]:
        """Returns the logits of rows, and the cache of each block."""
        documents, places = features["documents"], ops.arange(ops.shape(features["documents"])[1])
        is_same = documents[:, :, None] == documents[:, None, :]
        mask = ops.logical_and(is_same, places[:, None] >= places[None, :])
        return self._decode(features["tokens"], features["positions"], mask, training=training)

    def decode_next(self, tokens, place, caches: list[Cache]) -> tuple[tf.Tensor, list[Cache]]:
        """Returns the logits [batch, vocabulary_size] for the tokens [batch] at a place of rows, and the new caches.

        The rows' only document starts at place 0.
        """
        (length,) = caches[0][0].shape[1:2]
        mask = ops.broadcast_to(ops.arange(length) <= place, (ops.shape(tokens)[0], 1, length))
        positions = ops.broadcast_to(place, (ops.shape(tokens)[0], 1))
        logits, caches = self._decode(tokens[:, None], positions, mask, caches, place)
        return logits[:, 0], caches

    def _decode(self, tokens, positions, mask, caches=None, place=None, training=None):
        hidden, new = self.embedding(tokens), []
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            hidden, cache = block(hidden, positions, mask, cache=cache, place=place, training=training)
            new.append(cache)
        return self.embedding(self.norm(hidden), reverse=True), new

    @tf.function
    def complete(self, features: dict[str, tf.Tensor], numbers: tf.Tensor, temperature: float) -> tf.Tensor:
        """Continues the first document of each row to the row's end; returns its tokens (int32, [batch, length]).

        `numbers` (float32, [batch, length]), from 0 to 1, decide which tokens are drawn. After a drawn end all tokens
        are ends.
        """
        lengths = tf.reduce_sum(tf.cast(features["documents"] == 1, tf.int32), axis=1)
        length = features["tokens"].shape[1]
        # The caches contain other documents too; their keys are replaced before a token sees them.
        _, caches = self.decode(features)

        def next_token(place: tf.Tensor, tokens: tf.Tensor, caches: list[Cache]):
            logits, caches = self.decode_next(tokens[:, place], place, caches)
            drawn = draw(logits, numbers[:, place + 1], temperature)
            has_ended = (tokens[:, place] == self.end) & (place >= lengths)
            drawn = tf.where(has_ended, self.end, drawn)
            new = tf.where(place + 1 < lengths, tokens[:, place + 1], drawn)
            return place + 1, ops.slice_update(tokens, (0, place + 1), new[:, None]), caches

        first = tf.maximum(tf.reduce_min(lengths) - 1, 0)
        _, tokens, _ = tf.while_loop(
            lambda place, tokens, caches: place < length - 1, next_token, (first, features["tokens"], caches)
        )
        return tokens

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), **self.sizes}


def draw(logits: tf.Tensor, numbers: tf.Tensor, temperature: float) -> tf.Tensor:
    """Draws tokens (int32, [batch]) from softmax(logits / temperature) by numbers [batch] from 0 to 1.

    At temperature 0 it returns the likeliest tokens.
    """
    if temperature == 0.0:
        return tf.argmax(logits, axis=-1, output_type=tf.int32)
    sums = tf.cumsum(tf.nn.softmax(logits / temperature), axis=-1)
    drawn = tf.reduce_sum(tf.cast(sums <= numbers[:, None] * sums[:, -1:], tf.int32), axis=-1)
    return tf.minimum(drawn, logits.shape[-1] - 1)
