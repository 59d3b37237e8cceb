"""The models: the towers of users and items, and the head that says whether a user likes an item."""

import keras


@keras.saving.register_keras_serializable("recommendation")
class MeanEmbedding(keras.layers.Embedding):
    """Turns numbers (int32, [..., n]) into the mean of their vectors, [..., output_dim].

    Number 0 is unknown or padding and does not count. The mean of no vectors is zeros.
    """

    def call(self, numbers):
        vectors = super().call(numbers)
        is_known = keras.ops.cast(keras.ops.not_equal(numbers, 0), vectors.dtype)[..., None]
        count = keras.ops.maximum(keras.ops.sum(is_known, axis=-2), 1)
        return keras.ops.sum(vectors * is_known, axis=-2) / count

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], self.output_dim)


def create_tower(widths: dict[str, int], lengths: dict[str, int], sizes: dict[str, int], units: int) -> keras.Model:
    """Returns a model from columns, int32 [batch, lengths[column]] each by name, to vectors (float32, [batch, units]).

    Each column has a table with sizes[column] rows of widths[column] numbers.
    """
    inputs = {name: keras.Input((lengths[name],), dtype="int32", name=name) for name in widths}
    tables = {name: MeanEmbedding(sizes[name], width, name=f"{name}_table") for name, width in widths.items()}
    means = [table(inputs[name]) for name, table in tables.items()]
    joined = keras.layers.Concatenate()(means) if len(means) > 1 else means[0]
    # The vectors are float32 under mixed precision, too: 16 bits would make many scores equal.
    return keras.Model(inputs, keras.layers.Dense(units, dtype="float32", name="vector")(joined))


def create_ranking_head(vector_length: int, hidden: int) -> keras.Model:
    """Returns a model from the vectors "user" and "item", [batch, vector_length], to a logit (float32, [batch, 1])."""
    pair = {name: keras.Input((vector_length,), name=name) for name in ("user", "item")}
    joined = keras.layers.Concatenate()([*pair.values(), keras.layers.Multiply()([*pair.values()])])
    joined = keras.layers.Dense(hidden, activation="relu")(joined)
    return keras.Model(pair, keras.layers.Dense(1, dtype="float32")(joined))
