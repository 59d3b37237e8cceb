"""Prints the peak memory in MiB that training in sys.argv[1] micro-batches takes beyond building, and the loss."""

import json
import re
import sys
from pathlib import Path

from rendering import PROJECT

sys.path.insert(0, str(PROJECT))

import keras
import tensorflow as tf

import task
import train
from config import Config


def load_examples(split: str) -> tf.data.Dataset:
    numbers = tf.data.Dataset.range(64)
    return numbers.map(lambda i: (tf.ones([64, 64, 3]) * tf.cast(i, tf.float32) / 64, tf.cast(i % 10, tf.int32)))


def create_model() -> keras.Model:
    """Most of its memory are activations, which grow with the batch."""
    layers = [keras.layers.Conv2D(16, 3, padding="same", activation="gelu") for _ in range(6)]
    return keras.Sequential(
        [keras.Input((64, 64, 3)), *layers, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
    )


def peak() -> float:
    # Not getrusage's, which begins with the peak of the process that started this one.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.findall(r"VmHWM:\s*(\d+)", status)[0]) / 1024


task.load_examples, task.create_model = load_examples, create_model
task.prepare_example = lambda features, labels, *, training: (features, labels)
train.build(Config(global_batch_size=64, micro_batches=int(sys.argv[1]), steps_per_execution=1))
before = peak()
loss = [train.train_epoch(epoch)["train/loss"] for epoch in range(2)]
print(json.dumps({"mebibytes": peak() - before, "loss": loss}))
