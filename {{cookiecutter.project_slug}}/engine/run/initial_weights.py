"""Weights for a new run from elsewhere: --init-from.

A file is loaded as a whole first. If it does not fit so, it may hold a layer of the model, or the model may be a layer
of what it holds: such a part is found by its tree of variables, whatever its name.
"""

import collections
import contextlib
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

from engine.errors import BadInput, Damaged
from engine.model.replicas import is_seed
from engine.model.variables import by_name, model_variables
from engine.run.checkpoints import RECORD, checkpoint_paths, plain_name, read_checkpoint
from engine.run.directory import BEST, CHECKPOINTS
from engine.run.state import Variables, one_of_replicas
from engine.user_errors import first_line

FORMS = "a run directory, a checkpoint in one, a .weights.h5 or .keras file, or the prefix of a tf.train.Checkpoint"
KERAS_FILES = (".weights.h5", ".keras")

Models = dict[str, keras.Model]


def load_initial_weights(path: Path, model: Any, *, partial: bool) -> str:
    """Gives the model, or the dict of models, the weights in `path`; random seeds stay. Returns what matched.

    Args:
        path: one of FORMS. Of a run directory it is the best weights, or else those of the newest checkpoint.
        model: built. With several models only our own runs and a tf.train.Checkpoint(**models) can be loaded.
        partial: whether weights may be left over on either side.

    Raises:
        BadInput: the path is none of FORMS, or (without `partial`) its weights are not exactly those of the model.
    """
    models = by_name(model, "model")
    variables = {name: variable for name, variable in model_variables(model).items() if not is_seed(name)}
    weights = _Marked(variables)
    source, unused, failure = str(path), 0, None
    try:
        source, unused = _load_whole(path, models, variables, partial=partial)
    except BadInput:
        raise
    except Damaged as problem:
        raise BadInput(f"--init-from {path}: {problem}; give another checkpoint of its run") from problem
    except Exception as problem:  # noqa: BLE001 - It is raised below, unless a part fits.
        failure = problem
    fitting = 0 if failure else len(variables) - len(weights.missing())
    if fitting < len(variables) and not isinstance(failure, OSError | tf.errors.OpError):
        part = _find_part(path, models)
        if part and part.size > fitting:
            weights.mark()
            part.load()
            source, unused, failure = f"{source} ({part.name})", 0, None
    if failure:
        hint = "" if partial else "; --init-partial loads what matches"
        raise BadInput(f"--init-from {path} does not fit the model ({first_line(failure)}){hint}") from failure
    missing = weights.missing()
    weights.bring_back(missing)

    report = f"{len(variables) - len(missing)} of the model's {len(variables)} variables from {source}"
    if missing:
        report += f"; without {', '.join(missing[:3])}{', ...' if missing[3:] else ''}"
    if unused:
        report += f"; {unused} of the file's left over"
    if (missing or unused) and not partial:
        raise BadInput(f"--init-from {path} gives {report}: --init-partial loads what matches")
    if len(missing) == len(weights.floats):
        raise BadInput(
            f"--init-from {path} gives none of the model's variables: let it be of such a model or a layer of it, or "
            "load it in task.create_model"
        )
    return report


class _Marked:
    """Variables filled with NaN, which no weight is: what is NaN after the loading was not in the file."""

    def __init__(self, variables: Variables) -> None:
        self._variables = variables
        self._initial = {name: variable.numpy() for name, variable in variables.items()}
        self.floats = [name for name, variable in variables.items() if variable.dtype.is_floating]
        self.mark()

    def mark(self) -> None:
        for name, value in self._initial.items():
            self._variables[name].assign(np.full_like(value, np.nan) if name in self.floats else value)

    def missing(self) -> list[str]:
        return [name for name in self.floats if np.isnan(self._variables[name].numpy()).all()]

    def bring_back(self, names: list[str]) -> None:
        for name in names:
            self._variables[name].assign(self._initial[name])


# --- A file as a whole ------------------------------------------------------------------------------------------------


def _load_whole(path: Path, models: Models, variables: Variables, *, partial: bool) -> tuple[str, int]:
    """Loads what fits into the variables; returns from where, and how many values were left over."""
    if checkpoint := _find_checkpoint(path):
        return str(checkpoint), _load_checkpoint(checkpoint, variables)
    if path.is_file() and path.name.endswith(KERAS_FILES):
        if len(models) > 1:
            raise BadInput(f"--init-from {path} is of one model, and the task has {', '.join(models)}: use a run's")
        (model,) = models.values()
        with warnings.catch_warnings(action="ignore"):  # The report names what is missing.
            model.load_weights(path, skip_mismatch=partial)
        with _open_weights(path) as file:
            return str(path), max(0, len(_shapes(file)) - len(variables))
    if Path(f"{path}.index").is_file():
        roots = [tf.train.Checkpoint(**models)]  # It is of an object that has the models as attributes.
        if len(models) == 1:
            roots.append(tf.train.Checkpoint(*models.values()))  # Or of the model itself.
        for root in roots:
            with plain_name(path) as readable:
                root.read(readable).expect_partial()
            if not any(np.isnan(variable.numpy()).all() for variable in variables.values()):
                break
        return str(path), 0
    raise BadInput(f"--init-from {path} is nothing that weights can be loaded from: it has to be {FORMS}")


def _find_checkpoint(path: Path) -> Path | None:
    if (path / RECORD).is_file():
        return path
    return next((paths[-1] for folder in (BEST, CHECKPOINTS) if (paths := checkpoint_paths(path / folder))), None)


def _load_checkpoint(checkpoint: Path, variables: Variables) -> int:
    values, _ = read_checkpoint(checkpoint)
    kinds = {name.split("/", 1)[0] for name in variables}
    found = {name: value for name, value in values.items() if name.split("/", 1)[0] in kinds and not is_seed(name)}
    used = 0
    for name in found.keys() & variables.keys():
        value, shape = found[name], tuple(variables[name].shape)
        if value.shape[1:] == shape and value.shape != shape:
            value = one_of_replicas(value)
        if value.shape == shape:
            variables[name].assign(value)
            used += 1
    return len(found) - used


# --- A part of a file, whatever its name ------------------------------------------------------------------------------

NOT_WEIGHTS = ("optimizer", "_optimizer", "save_counter", "_seed_generators", "seed_generator")

Tree = dict[str, Any]
"""Variables, or what stands for them in a file, by their places below a layer: "_layers/1/bias"."""


class Part(NamedTuple):
    """A layer of the models that a file holds: the same tree of variables, of the same shapes."""

    name: str
    """What it is called in the file and in the model."""
    size: int
    key: tuple[frozenset[int], str]
    """Its variables, and the first of their names in the file."""
    load: Callable[[], None]


def _find_part(path: Path, models: Models) -> Part | None:
    """Returns the largest layer of the models that a file holds. Raises BadInput if several could be meant."""
    parts: list[Part] = []
    if Path(f"{path}.index").is_file():
        parts = list(_parts_in_object_graph(path, _layers(models)))
    elif path.name.endswith(KERAS_FILES):
        with contextlib.suppress(OSError, KeyError, zipfile.BadZipFile):  # Not a file of Keras, for all its name.
            parts = list(_parts_in_keras_file(path, _layers(models)))
    largest = max((part.size for part in parts), default=0)
    different: dict[Any, Part] = {}
    for part in parts:
        if part.size == largest:
            # A model and the one layer that it consists of are the same variables, under two names.
            different.setdefault(part.key, part)
    if len(different) > 1:
        names = "; ".join(part.name for part in list(different.values())[:3])
        raise BadInput(f"--init-from {path} fits in several ways ({names}): load what is meant in task.create_model")
    return next(iter(different.values()), None)


def _part(begin: str, layer: keras.layers.Layer, tree: Tree, names: list[str], load: Callable[[], None]) -> Part:
    name = f"{f'its {begin!r} ' if begin else ''}as {layer.name!r}"
    return Part(name, len(tree), (frozenset(id(variable) for variable in tree.values()), min(names)), load)


def _layers(models: Models) -> list[tuple[keras.layers.Layer, Tree]]:
    """Returns the models and every layer in them, outer ones first, each with its variables."""
    layers = []
    for model in models.values():
        view = tf.train.TrackableView(model)
        for layer in view.descendants():
            if isinstance(layer, keras.layers.Layer):
                nodes = _nodes_below(layer, view.children)
                tree = {place: node.value for place, node in nodes.items() if isinstance(node, keras.Variable)}
                layers += [(layer, tree)] if tree else []
    return layers


def _tree_shapes(tree: Tree) -> dict[str, tuple[int, ...]]:
    return {place: tuple(variable.shape) for place, variable in tree.items()}


def _nodes_below(root: Any, children: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Returns the nodes of an object graph below one of them, each by the shortest way to it: "_layers/1/bias"."""
    nodes, seen, level = {}, {_identity(root)}, {"": root}
    while level:
        level_below = {}
        for place, parent in level.items():
            for name, child in children(parent).items():
                if name not in NOT_WEIGHTS and _identity(child) not in seen:
                    seen.add(_identity(child))
                    level_below[f"{place}/{name}".lstrip("/")] = child
        nodes |= level_below
        level = level_below
    return nodes


def _identity(node: Any) -> int:
    return node if isinstance(node, int) else id(node)  # A file's nodes are numbers.


def _parts_in_object_graph(prefix: Path, layers: list[tuple[keras.layers.Layer, Tree]]) -> Iterator[Part]:
    with plain_name(prefix) as readable:
        reader = tf.train.load_checkpoint(readable)
        shapes, graph = reader.get_variable_to_shape_map(), TrackableObjectGraph()
        if "_CHECKPOINTABLE_OBJECT_GRAPH" not in shapes:  # TensorFlow 1 wrote it.
            return
        graph.ParseFromString(reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH"))
    children = [{child.local_name: child.node_id for child in node.children} for node in graph.nodes]
    names = {number: each.checkpoint_key for number, node in enumerate(graph.nodes) for each in node.attributes}
    for begin, root in {"": 0, **_nodes_below(0, children.__getitem__)}.items():
        nodes = _nodes_below(root, children.__getitem__)
        found = {place: names[node] for place, node in nodes.items() if names.get(node) in shapes}
        for layer, tree in layers:
            if _tree_shapes(tree) == {place: tuple(shapes[name]) for place, name in found.items()}:

                def load(tree: Tree = tree, found: dict[str, str] = found) -> None:
                    with plain_name(prefix) as readable:
                        reader = tf.train.load_checkpoint(readable)
                        for place, variable in tree.items():
                            variable.assign(reader.get_tensor(found[place]))

                yield _part(begin, layer, tree, list(found.values()), load)


def _parts_in_keras_file(path: Path, layers: list[tuple[keras.layers.Layer, Tree]]) -> Iterator[Part]:
    with _open_weights(path) as file:
        groups: dict[str, dict[str, tuple[int, ...]]] = collections.defaultdict(dict)
        for name, shape in _shapes(file).items():
            steps = name.split("/")
            for depth in range(len(steps)):
                groups["/".join(steps[:depth])]["/".join(steps[depth:])] = shape
    for begin, found in sorted(groups.items(), key=lambda group: len(Path(group[0]).parts)):
        for model, tree in layers:
            # Only a model can be asked for its layout in such a file. It writes one for that, so only if it may fit.
            may_fit = isinstance(model, keras.Model) and sorted(_tree_shapes(tree).values()) == sorted(found.values())
            if may_fit and _layout(model) == found:

                def load(begin: str = begin, model: keras.Model = model) -> None:
                    with _open_weights(path) as file, tempfile.TemporaryDirectory() as folder:
                        alone = Path(folder, "part.weights.h5")
                        with h5py.File(alone, "w") as part:
                            for name, item in file[begin or "/"].items():
                                file.copy(item, part, name)
                        model.load_weights(alone)

                yield _part(begin, model, tree, [f"{begin}/{place}" for place in found], load)


def _layout(model: keras.Model) -> dict[str, tuple[int, ...]]:
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "model.weights.h5")
        model.save_weights(written)
        with h5py.File(written) as file:
            return _shapes(file)


@contextlib.contextmanager
def _open_weights(path: Path) -> Iterator[h5py.File]:
    with contextlib.ExitStack() as opened:
        if path.suffix == ".keras":
            path = opened.enter_context(opened.enter_context(zipfile.ZipFile(path)).open("model.weights.h5"))
        yield opened.enter_context(h5py.File(path))


def _shapes(file: h5py.File) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every array of a model by its name, those of its optimizer and seeds left out."""
    shapes: dict[str, tuple[int, ...]] = {}

    def note(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and not set(NOT_WEIGHTS) & set(name.split("/")):
            shapes[name] = item.shape

    file.visititems(note)
    return shapes
