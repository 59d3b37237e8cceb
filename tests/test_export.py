"""--export and predict.py as programs: on other devices than the training had, and in a cluster."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from rendering import Bake, run

# A lookup table and a variable of task.py's own. Made when the file is imported, they would start TensorFlow before the
# devices are chosen.
WITH_TABLE = """

import functools


@functools.cache
def table_and_scale():
    with tf.init_scope():  # Outside the graph of the hook.
        initializer = tf.lookup.KeyValueTensorInitializer(tf.range(10), tf.range(10, dtype=tf.float32) / 10.0)
        return tf.lookup.StaticHashTable(initializer, -1.0), tf.Variable(2.0)


_prepare_example = prepare_example


def prepare_example(features, labels, *, training, seed):
    table, scale = table_and_scale()
    features, labels = _prepare_example(features, labels, training=training, seed=seed)
    return features + table.lookup(tf.cast(10.0 * features[4, 4, 0], tf.int32)) * scale, labels
"""
WITH_TENSORFLOW_ONLY = """
import sys
sys.modules["keras"] = None  # What imports it fails.
import numpy as np
import tensorflow as tf
signatures = tf.saved_model.load(sys.argv[1]).signatures
found = signatures["serve_examples"](features=tf.constant(np.load(sys.argv[2])))
np.savez(sys.argv[3], **{name: np.array(value.numpy().tolist()) for name, value in found.items()})
"""


@pytest.mark.long
@pytest.mark.parametrize("workers", [1, 2])
def test_run_of_two_replicas_is_exported_and_predicted_on_one_device(
    workers: int, bake: Callable[..., Bake], tmp_path: Path
) -> None:
    project = bake()
    with (project.folder / "task.py").open("a", encoding="utf-8") as task:
        task.write(WITH_TABLE)
    images, labels = load_digits(return_X_y=True)
    is_tested = np.arange(len(images)) % 5 == 0
    np.save(project.folder / "digits.npy", images[is_tested].reshape(-1, 8, 8, 1).astype("float32"))
    flags = ("--epochs", "2", "--ema-decay", "0.9")
    if workers == 1:
        project.run("python", "train.py", *flags, "--simulated-devices", "2")
        result = project.result("runs/default")
        done = project.run("python", "train.py", "--export")
        assert "Finished already after 2 epochs" in done.stdout
        assert project.result("runs/default") == result
    else:
        done = project.run("python", "launch.py", "--workers", "2", "--", *flags, "--export")
        assert done.stdout.count("Exported to runs/default/export") == 1
        result = project.result("runs/default")
    project.run("python", "predict.py", "runs/default", "digits.npy", "--output", "digits.npz", "--batch-size", "100")
    elsewhere = shutil.move(project.folder / "runs/default/export/saved_model", tmp_path / "elsewhere")
    done = run("python", "-c", WITH_TENSORFLOW_ONLY, elsewhere, "digits.npy", "found.npz", folder=project.folder)
    assert done.returncode == 0, done.stderr
    predicted, found = (np.load(project.folder / name) for name in ("digits.npz", "found.npz"))
    assert np.mean(predicted["label"] == labels[is_tested]) == pytest.approx(result["test/accuracy"], abs=1e-7)
    np.testing.assert_allclose(found["probabilities"], predicted["probabilities"], rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(found["label"], predicted["label"])


WITHOUT_TENSORFLOW = """
import sys
sys.modules["tensorflow"] = None  # What imports it fails.
import predict
for arguments in (["--help"], ["runs/none", "task.py"], ["runs/none", "task.py", "--batch-size", "0"], ["runs/none"]):
    try:
        predict.main(arguments)
    except SystemExit as ending:
        print("ended with", ending.code, file=sys.stderr)
"""


def test_mistakes_end_predict_before_tensorflow_is_imported(default_bake: Bake) -> None:
    done = run(sys.executable, "-c", WITHOUT_TENSORFLOW, folder=default_bake.folder)
    assert done.stdout.startswith("usage: ")
    beginnings = [
        "ended with 0",
        "ERROR: runs/none contains no run",
        "ended with 2",
        "ERROR: --batch-size 0 must be at least 1",
        "ended with 2",
        "ERROR: Missing from -c: INPUT",
        "ended with 2",
    ]
    assert all(map(str.startswith, done.stderr.splitlines(), beginnings)), done.stderr
    assert done.stderr.count("\n") == len(beginnings)
