"""Trains the starter language_model with a plain compiled loop and with train.py, in turns, and prints both speeds.

    python benchmarks/language_model.py [--rounds 5] [--layers 2] [--width 128]

The plain loop takes the same Keras model, loss, optimizer and batches of the same size, and has no metrics. A round is
an epoch of each. The MFU is the fraction of the speed of a product of matrices, as the starter reports it.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "{{cookiecutter.project_slug}}"))
sys.path.insert(0, str(Path(__file__).parent.parent / "{{cookiecutter.project_slug}}/starters/language_model"))

import keras
import tensorflow as tf
from prepare_data import Arguments, make_records
from speed import floating_point_operations, measured_peak

import task
import train
from config import Config
from engine.command_line import read_settings


def plain_epoch() -> Any:
    """Returns a function that trains an epoch with GradientTape in a compiled step, and the number of its steps."""
    config = task.config
    model, optimizer = task.model, task.create_optimizer(total_steps=10_000)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    examples = tf.data.TFRecordDataset(str(config.records / "train.tfrecord")).cache().shuffle(10_000)
    examples = examples.map(task.prepare_example, num_parallel_calls=tf.data.AUTOTUNE)
    batches = examples.batch(config.global_batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    @tf.function
    def step(features: dict[str, tf.Tensor], labels: tf.Tensor) -> tf.Tensor:
        weights = tf.cast(labels >= 0, tf.float32)
        with tf.GradientTape() as tape:
            losses = loss_of(tf.where(labels >= 0, labels, 0), model(features, training=True))
            loss = tf.reduce_sum(losses * weights) / tf.reduce_sum(weights)
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, config.global_clipnorm)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def epoch() -> None:
        for features, labels in batches:
            loss = step(features, labels)
        float(loss)

    return epoch


def our_epoch() -> None:
    train.train_epoch(train.run.epoch)
    train.run.progress.end_epoch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=Config.layers)
    parser.add_argument("--width", type=int, default=Config.width)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder, "records")
        make_records(Arguments(texts=Path(task.__file__).parent / "data", records=records))
        sizes = [f"--layers={options.layers}", f"--width={options.width}"]
        train.build(read_settings(Config, [f"--records={records}", f"--run-dir={folder}/run", *sizes]))
        steps = train.batches["train"].steps_per_epoch
        tokens = steps * task.config.global_batch_size * task.config.sequence_length
        epochs = {"plain loop": plain_epoch(), "train.py": our_epoch}
        speeds: dict[str, list[float]] = {name: [] for name in epochs}
        cpu_times: dict[str, list[float]] = {name: [] for name in epochs}  # On a shared machine they say more.
        peaks = []
        for number in range(options.rounds + 1):
            for name, epoch in epochs.items():
                started, cpu_started = time.perf_counter(), time.process_time()
                epoch()
                if number:  # The first round compiles.
                    speeds[name].append(tokens / (time.perf_counter() - started))
                    cpu_times[name].append(1e6 * (time.process_time() - cpu_started) / tokens)
            measured_peak.cache_clear()
            peaks.append(measured_peak("float32"))
    operations = floating_point_operations(task.model, task.config.sequence_length)
    print(f"{task.model.count_params():,} parameters, {steps} steps an epoch, medians of {options.rounds} rounds")
    print(f"{'product of matrices':20} {max(peaks) / 1e9:10,.0f} GFLOP/s")
    for name, values in speeds.items():
        median = statistics.median(values)
        mfu, cpu_time = 100 * median * operations / max(peaks), statistics.median(cpu_times[name])
        print(f"{name:20} {median:10,.0f} tokens/s  {mfu:5.1f} % MFU  {cpu_time:5.1f} µs of CPU time a token")
    ratios = [ours / plain for plain, ours in zip(*speeds.values(), strict=True)]
    print(f"{'train.py / plain':20} {statistics.median(ratios):10.3f}")


if __name__ == "__main__":
    main()
