"""--init-from: weights for a new run, from another run or a file; with --init-partial only the weights that match.

Weights for a part of the model are loaded in task.create_model instead.
"""

import contextlib
import io
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf

from engine.cluster.workers import Workers
from engine.errors import BadInput, Damaged, Unavailable, first_line, may_pass
from engine.model.objects import TaskObjects
from engine.model.variables import Variables, by_name, is_seed, model_variables
from engine.run.checkpoint_files import PROGRESS, StoredValues, checkpoint_paths, plain_name, read_record
from engine.run.directory import BEST, CHECKPOINTS, Directory
from engine.run.state import State, as_array, one_of_replicas, portions
from engine.settings import Settings

FORMS = "a run directory, a checkpoint in one, a .weights.h5 or .keras file, or the prefix of a tf.train.Checkpoint"
NOT_WEIGHTS = {"optimizer", "seed_generators", "seed_generator"}  # Groups in a Keras file, some with "_" before.


def initialize(settings: Settings, strategy: tf.distribute.Strategy, workers: Workers, objects: TaskObjects) -> None:
    """Loads the weights of --init-from into the models, on all workers, if the run does not resume a checkpoint.

    Call it before the optimizers are built, because some of them copy the weights. Raises BadInput if they do not fit.
    """
    path, (listed, unlisted) = settings.init_from, objects.initial_weights()
    if path is None or not workers.from_chief(lambda: settings.evaluates or Directory(settings).starts_new()):
        return
    state = State(strategy, workers, listed | unlisted, after_assign=objects.finalize_layers)
    objects.source = workers.from_chief(
        lambda: load_initial_weights(path, objects.model, unlisted, partial=settings.init_partial)
    )
    state.assign(state.mirrored_values())


def load_initial_weights(path: Path, model: Any, unlisted: Variables | None = None, *, partial: bool) -> str:
    """Loads the weights in `path` into the built model, or dict of models; random seeds stay. Returns what matched.

    `path` is one of FORMS. Of a run directory the best weights are loaded, or else the newest checkpoint's. Several
    models need a run or a tf.train.Checkpoint(**models). Variables that Keras does not list, `unlisted`, are in
    checkpoints of runs alone. Raises BadInput if the path is none of FORMS, or (without `partial`) weights are missing
    or unused.
    """
    models = by_name(model, "model")
    variables = {name: variable for name, variable in model_variables(model).items() if not is_seed(name)}
    variables |= unlisted or {}
    checkpoint = _find_checkpoint(path)
    with _failures_named(path, "" if partial else "; --init-partial loads what matches"):
        if checkpoint:
            loaded, unused = _load_checkpoint(checkpoint, variables)
        else:
            loaded, unused = _load_file(path, models, variables, partial=partial)
    floats = [name for name in variables if name in loaded and variables[name].dtype.is_floating]
    if nan := [name for name in floats if np.isnan(variables[name].numpy()).any()]:
        raise BadInput(f"--init-from {path} contains NaN in {', '.join(nan[:3])}: pass weights from before it diverged")
    missing = [name for name in variables if name not in loaded]

    report = f"{len(loaded)} of the model's {len(variables)} variables from {checkpoint or path}"
    if missing:
        report += f"; without {', '.join(missing[:3])}{', ...' if missing[3:] else ''}"
    if unused:
        report += f"; {unused} in the file are unused"
    if not floats:
        raise BadInput(
            f"--init-from {path} matches none of the model's variables: pass weights of this model, or load those of a "
            "part of it in task.create_model"
        )
    # Variables that Keras does not list are in checkpoints of runs alone.
    needed = [name for name in missing if checkpoint or name not in (unlisted or {})]
    if (needed or unused) and not partial:
        raise BadInput(f"--init-from {path} gives {report}: --init-partial loads what matches")
    return report


@contextlib.contextmanager
def _failures_named(path: Path, hint: str) -> Iterator[None]:
    try:
        yield
    except BadInput:
        raise
    except Damaged as problem:
        raise BadInput(f"--init-from {path}: {problem}; pass another checkpoint of its run") from problem
    except (OSError, EOFError, IndexError, zlib.error, zipfile.BadZipFile, tf.errors.OpError) as problem:
        if may_pass(problem):
            raise Unavailable(f"--init-from {path} cannot be read now ({first_line(problem)}): try again") from problem
        raise BadInput(
            f"--init-from {path}: the file is damaged ({first_line(problem)}): restore it from a backup, or pass other "
            "weights"
        ) from problem
    except Exception as problem:
        raise BadInput(f"--init-from {path} does not fit the model ({first_line(problem)}){hint}") from problem


def _load_file(
    path: Path, models: dict[str, keras.Model], variables: Variables, *, partial: bool
) -> tuple[set[str], int]:
    """Loads what fits of a file of Keras or TensorFlow; returns the variables loaded, and how many values are unused.

    Variables of integers count as loaded, because neither library says what it has loaded.
    """
    initial = {name: variable.numpy() for name, variable in variables.items() if variable.dtype.is_floating}
    for name, value in initial.items():
        variables[name].assign(np.full_like(value, np.inf))
    unused, adapters = 0, set()
    if path.is_file() and path.name.endswith((".weights.h5", ".keras")):
        if len(models) > 1:
            raise BadInput(
                f"--init-from {path} contains one model, and the task has {', '.join(models)}: pass a run directory"
            )
        (model,) = models.values()
        listed = sum(not name.startswith("hidden/") for name in variables)
        # Counted before anything is loaded: of a damaged file, Keras would name another reason.
        unused = max(0, _count_weights(path) - listed)
        with warnings.catch_warnings(action="ignore"):  # The report names the missing variables.
            model.load_weights(path, skip_mismatch=partial)
        # A file has adapters (LoRA) in its kernels. Keras has set both of their matrices to 0, which would stay so.
        adapters = {name for name in initial if name.rpartition("/")[2].startswith("lora_")}
    elif Path(f"{path}.index").is_file():
        roots = [tf.train.Checkpoint(**models)]  # The models may be attributes of the saved object.
        if len(models) == 1:
            roots.append(tf.train.Checkpoint(*models.values()))  # Or the model is the object itself.
        for root in roots:
            with plain_name(path) as readable:
                root.read(readable).expect_partial()  # Only what the file has under the root's names.
    else:
        raise BadInput(f"--init-from {path} contains no weights: it must be {FORMS}")
    # No file has weights that are all infinite: a variable that still is was not in it.
    missing = adapters | {name for name in initial if np.isposinf(variables[name].numpy()).all()}
    for name in missing:
        variables[name].assign(initial[name])
    return {name for name in variables if name not in missing or np.isposinf(initial[name]).all()}, unused


def _find_checkpoint(path: Path) -> Path | None:
    if (path / PROGRESS).is_file():
        return path
    return next((paths[-1] for folder in (BEST, CHECKPOINTS) if (paths := checkpoint_paths(path / folder))), None)


def _load_checkpoint(checkpoint: Path, variables: Variables) -> tuple[set[str], int]:
    """Loads what fits of a checkpoint of a run; returns the variables loaded, and how many weights are unused."""
    values = StoredValues(checkpoint)
    read_record(checkpoint)  # It compares the checksum of the index.
    kinds = {name.split("/", 1)[0] for name in variables} - {"hidden"}
    found = {name for name in values if (name.split("/", 1)[0] in kinds or name in variables) and not is_seed(name)}
    loaded = set()
    for names in portions({name: variable for name, variable in variables.items() if name in found}):
        for name, value in values.read(names).items():
            variable = variables[name]
            # A checkpoint has the values of all replicas, [replicas, ...], of variables that may differ between them.
            may_differ = name.startswith("hidden/") or not variable.trainable
            if may_differ and value.shape[1:] == variable.shape and value.shape != variable.shape:
                value = as_array(one_of_replicas(as_array(value)))
            if value.shape == variable.shape:
                variable.assign(tf.cast(value, variable.dtype))
                loaded.add(name)
    return loaded, len(found) - len(loaded)


def _count_weights(path: Path) -> int:
    """Returns how many arrays a Keras file has, without the optimizer's and the seeds'."""
    names: list[str] = []

    def add(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and NOT_WEIGHTS.isdisjoint(part.lstrip("_") for part in name.split("/")):
            names.append(name)

    # All bytes are read, which compares the archive's checksums.
    opened = io.BytesIO(zipfile.Path(path, "model.weights.h5").read_bytes()) if path.suffix == ".keras" else path
    with h5py.File(opened) as file:
        file.visititems(add)
    return len(names)
