"""Weights for a new run from elsewhere: --init-from."""

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
from engine.mistakes import first_line
from engine.model.objects import by_name, model_variables
from engine.model.replicas import is_seed
from engine.run.checkpoints import RECORD, checkpoint_paths, plain_name, read_checkpoint
from engine.run.directory import BEST, CHECKPOINTS
from engine.run.state import Variables, one_of_replicas

FORMS = "a run directory, a checkpoint in one, a .weights.h5 or .keras file, or the prefix of a tf.train.Checkpoint"


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
    initial = {name: variable.numpy() for name, variable in variables.items()}
    floats = [name for name, value in initial.items() if tf.as_dtype(value.dtype).is_floating]

    def clear() -> None:
        # No weight is NaN, so one that is NaN after the loading was not in the file.
        for name, value in initial.items():
            variables[name].assign(np.full_like(value, np.nan) if name in floats else value)

    def unset() -> list[str]:
        return [name for name in floats if np.isnan(variables[name].numpy()).all()]

    clear()
    source, unused, failure = str(path), 0, None
    try:
        source, unused = _load(path, models, variables, partial=partial)
    except BadInput:
        raise
    except Damaged as problem:
        raise BadInput(f"--init-from {path}: {problem}; give another checkpoint of its run") from problem
    except Exception as problem:  # noqa: BLE001 - It is raised below, unless there is another way.
        failure = problem
    missing = unset()
    if missing and not isinstance(failure, OSError | tf.errors.OpError):  # What cannot be read has no part either.
        part = _part_in(path, models)
        if part and part.variables > (0 if failure else len(variables) - len(missing)):
            clear()
            part.load()
            source, unused, failure, missing = f"{source} ({part.name})", 0, None, unset()
    if failure:
        hint = "" if partial else "; --init-partial loads what matches"
        raise BadInput(f"--init-from {path} does not fit the model ({first_line(failure)}){hint}") from failure
    for name in missing:
        variables[name].assign(initial[name])

    matched = f"{len(variables) - len(missing)} of the model's {len(variables)} variables"
    without = f"without {', '.join(missing[:3])}{', ...' if missing[3:] else ''}" if missing else ""
    left_over = f"{unused} of the file's left over" if unused else ""
    report = "; ".join(part for part in (f"{matched} from {source}", without, left_over) if part)
    if (missing or unused) and not partial:
        raise BadInput(f"--init-from {path} gives {report}: --init-partial loads what matches")
    if len(missing) == len(floats):
        raise BadInput(
            f"--init-from {path} gives none of the model's variables: let it be of such a model or a layer of it, or "
            "load it in task.create_model"
        )
    return report


def _load(path: Path, models: dict[str, keras.Model], variables: Variables, *, partial: bool) -> tuple[str, int]:
    """Loads what there is into the variables; returns where from, and how many values of there were not used."""
    if checkpoint := _checkpoint_in(path):
        return str(checkpoint), _load_ours(checkpoint, variables)
    if path.is_file() and path.name.endswith((".weights.h5", ".keras")):
        if len(models) > 1:
            raise BadInput(f"--init-from {path} is of one model, and the task has {', '.join(models)}: use a run's")
        (model,) = models.values()
        with warnings.catch_warnings(action="ignore"):  # About what the report tells.
            model.load_weights(path, skip_mismatch=partial)
        return str(path), max(0, _arrays(path) - len(variables))
    if Path(f"{path}.index").is_file():
        _load_object_graph(path, models, variables)
        return str(path), 0
    raise BadInput(f"--init-from {path} is nothing that weights can be loaded from: it has to be {FORMS}")


def _checkpoint_in(path: Path) -> Path | None:
    if (path / RECORD).is_file():
        return path
    for folder in (BEST, CHECKPOINTS):
        if paths := checkpoint_paths(path / folder):
            return paths[-1]
    return None


def _load_ours(checkpoint: Path, variables: Variables) -> int:
    values, _ = read_checkpoint(checkpoint)
    kinds = {name.split("/", 1)[0] for name in variables}
    found = {name: value for name, value in values.items() if name.split("/", 1)[0] in kinds and not is_seed(name)}
    used = 0
    for name, value in found.items():
        if name in variables:
            shape = tuple(variables[name].shape)
            value = one_of_replicas(value) if value.shape[1:] == shape and value.shape != shape else value
            if value.shape == shape:
                variables[name].assign(value)
                used += 1
    return len(found) - used


def _load_object_graph(prefix: Path, models: dict[str, keras.Model], variables: Variables) -> None:
    """Loads from what tf.train.Checkpoint wrote, of an object that has the models as attributes, or of the model."""
    roots = [tf.train.Checkpoint(**models)]
    if len(models) == 1:
        roots.append(tf.train.Checkpoint(*models.values()))
    for root in roots:
        with plain_name(prefix) as readable:
            root.read(readable).expect_partial()
        if not any(np.isnan(variable.numpy()).all() for variable in variables.values()):
            return


def _arrays(path: Path) -> int:
    """Returns how many arrays of a model a .weights.h5 or .keras file holds, those of its optimizer left out."""
    with _weights_file(path) as file:
        return len(_shapes(file))


@contextlib.contextmanager
def _weights_file(path: Path) -> Iterator[h5py.File]:
    with contextlib.ExitStack() as opened:
        if path.suffix == ".keras":
            path = opened.enter_context(opened.enter_context(zipfile.ZipFile(path)).open("model.weights.h5"))
        yield opened.enter_context(h5py.File(path))


def _shapes(file: h5py.File) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every array of a model by its place, those of its optimizer and seeds left out."""
    shapes: dict[str, tuple[int, ...]] = {}

    def note(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and not name.startswith("optimizer/") and "seed_generator" not in name:
            shapes[name] = item.shape

    file.visititems(note)
    return shapes


# --- A layer of the model, whatever it is called in the file ----------------------------------------------------------

NOT_OF_A_LAYER = ("optimizer", "_optimizer", "save_counter", "_seed_generators", "seed_generator")


class Part(NamedTuple):
    """A model or layer of ours that is in a file as a whole: the same tree of variables, of the same shapes."""

    name: str
    """What it is called here and there."""
    variables: int
    key: tuple[frozenset[int], str]
    """Which variables it is, and where in the file they begin."""
    load: Callable[[], None]


def _part_in(path: Path, models: dict[str, keras.Model]) -> Part | None:
    """Returns the largest part of the models that a file holds. Raises BadInput if several could be meant."""
    if Path(f"{path}.index").is_file():
        parts = _parts_in_object_graph(path, _layers(models))
    elif path.name.endswith((".weights.h5", ".keras")):
        parts = _parts_in_weights_file(path, _layers(models))
    else:
        return None
    largest = max((part.variables for part in parts), default=0)
    # A model and the one layer that it consists of are the same variables, under two names.
    different = list({part.key: part for part in reversed(parts) if part.variables == largest}.values())[::-1]
    if len(different) > 1:
        raise BadInput(
            f"--init-from {path} fits in several ways ({'; '.join(part.name for part in different[:3])}): load what is "
            "meant in task.create_model"
        )
    return different[0] if different else None


Tree = dict[str, Any]  # Variables, or what stands for them in a file, by their places: "_layers/1/bias".


def _layers(models: dict[str, keras.Model]) -> list[tuple[keras.layers.Layer, Tree]]:
    """Returns the models and every layer in them, outer ones first, each with its variables."""
    layers = []
    for model in models.values():
        view = tf.train.TrackableView(model)
        for each in view.descendants():
            if isinstance(each, keras.layers.Layer):
                nodes = _nodes(each, view.children)
                tree = {place: node.value for place, node in nodes.items() if isinstance(node, keras.Variable)}
                layers += [(each, tree)] if tree else []
    return layers


def _nodes(root: Any, children: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    """Returns what is below a node of an object graph by its places, in which each node has the nearest one only."""
    nodes, seen, level = {}, {_key(root)}, {"": root}
    while level:
        found = {
            f"{place}/{name}".lstrip("/"): child
            for place, parent in level.items()
            for name, child in children(parent).items()
            if name not in NOT_OF_A_LAYER
        }
        level = {}
        for place, child in found.items():
            if _key(child) not in seen:
                seen.add(_key(child))
                level[place] = child
        nodes |= level
    return nodes


def _key(node: Any) -> int:
    return node if isinstance(node, int) else id(node)  # A file's nodes are numbers.


def _parts_in_object_graph(prefix: Path, layers: list[tuple[keras.layers.Layer, Tree]]) -> list[Part]:
    with plain_name(prefix) as readable:
        reader = tf.train.load_checkpoint(readable)
        shapes, graph = reader.get_variable_to_shape_map(), TrackableObjectGraph()
        if "_CHECKPOINTABLE_OBJECT_GRAPH" not in shapes:  # Of TensorFlow 1.
            return []
        graph.ParseFromString(reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH"))
    below = {
        number: {each.local_name: each.node_id for each in node.children} for number, node in enumerate(graph.nodes)
    }
    keys = {number: each.checkpoint_key for number, node in enumerate(graph.nodes) for each in node.attributes}
    ours = [(layer, tree, _shapes_of(tree)) for layer, tree in layers]
    parts = []
    for begin, root in {"": 0, **_nodes(0, below.get)}.items():
        there = {place: keys[number] for place, number in _nodes(root, below.get).items() if keys.get(number) in shapes}
        shapes_there = {place: tuple(shapes[key]) for place, key in there.items()}
        for layer, tree, shapes_of_tree in ours:
            if shapes_of_tree != shapes_there:
                continue

            def load(there: Tree = there, tree: Tree = tree) -> None:
                with plain_name(prefix) as readable:
                    reader = tf.train.load_checkpoint(readable)
                    for place, variable in tree.items():
                        variable.assign(reader.get_tensor(there[place]))

            parts.append(Part(_told(begin, layer), len(tree), (_identity(tree), min(there.values())), load))
    return parts


def _shapes_of(tree: Tree) -> dict[str, tuple[int, ...]]:
    return {place: tuple(variable.shape) for place, variable in tree.items()}


def _identity(tree: Tree) -> frozenset[int]:
    return frozenset(id(variable) for variable in tree.values())


def _told(begin: str, layer: keras.layers.Layer) -> str:
    return f"{f'its {begin!r} ' if begin else ''}as {layer.name!r}"


def _below(places: dict[str, tuple[int, ...]]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Returns what is below every place in a tree: {"": {"a/b": ...}, "a/": {"b": ...}}; outer places first."""
    below: dict[str, dict[str, tuple[int, ...]]] = collections.defaultdict(dict)
    for place, shape in places.items():
        names = place.split("/")
        if any(name in NOT_OF_A_LAYER for name in names):
            continue
        for depth in range(len(names)):
            begin = "".join(f"{name}/" for name in names[:depth])
            below[begin]["/".join(names[depth:])] = shape
    return dict(sorted(below.items(), key=lambda each: each[0].count("/")))


def _parts_in_weights_file(path: Path, layers: list[tuple[keras.layers.Layer, Tree]]) -> list[Part]:
    try:
        with _weights_file(path) as file:
            below = _below(_shapes(file))
    except (OSError, KeyError, zipfile.BadZipFile):
        return []
    parts = []
    for begin, there in below.items():
        for layer, tree in layers:
            # Only a model knows how its weights are laid out in such a file, and it is asked only if they may be these.
            if not isinstance(layer, keras.Model) or sorted(_shapes_of(tree).values()) != sorted(there.values()):
                continue
            with tempfile.TemporaryDirectory() as folder:
                written = Path(folder, "of.weights.h5")
                layer.save_weights(written)
                with h5py.File(written) as file:
                    if _shapes(file) != there:
                        continue

            def load(begin: str = begin, model: keras.Model = layer) -> None:
                with tempfile.TemporaryDirectory() as folder:
                    written = Path(folder, "of.weights.h5")
                    with _weights_file(path) as file, h5py.File(written, "w") as only:
                        group = file[begin] if begin else file
                        for name in group:
                            group.copy(name, only)
                    model.load_weights(written)

            first = min(f"{begin}{place}" for place in there)
            parts.append(Part(_told(begin.rstrip("/"), layer), len(tree), (_identity(tree), first), load))
    return parts
