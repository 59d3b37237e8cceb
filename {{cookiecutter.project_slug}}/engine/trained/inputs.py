"""The examples that predict.py is given: NumPy's files, CSV, TFRecord, or a folder of images."""

import csv
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from engine.data.element_spec import as_text, leaves
from engine.errors import BadInput
from engine.user_errors import first_line

IMAGES = (".bmp", ".gif", ".jpeg", ".jpg", ".png")
TRUE, FALSE = ("1", "true"), ("0", "false")

Row = tuple[str, dict[str, Any]]
"""What an example is called, in messages too, and its values by the names of the tensors."""
Batch = tuple[list[str], Any]
"""The names of examples, and their features in their structure, [n, ...]."""


def read_batches(path: Path, spec: Any, size: int) -> Iterator[Batch]:
    """Yields the examples of a file or folder in its order, `size` at a time; the last ones may be fewer.

    Args:
        path: what to read; its name says of which kind it is.
        spec: the type of the features of one example as task.load_examples gives them.
        size: examples in a batch.

    Raises:
        BadInput: such a file cannot hold such examples, or a row is not one.
    """
    types, kind = leaves(spec), path.name.lower()
    try:
        if kind.endswith((".npy", ".npz")):
            batches = _array_batches(_load_arrays(path, types), types, size, f"{path}: ")
        elif path.is_dir() and _is_single(types, image=True, text=True):
            batches = _row_batches(_read_folder(path, types), types, size)
        elif kind.endswith(".csv") and all(leaf.shape.rank in (0, 1) for leaf in types.values()):
            batches = _row_batches(_read_csv(path, types), types, size)
        elif ".tfrec" in kind and _is_single(types, text=True):
            batches = _row_batches(_read_records(path, types), types, size)
        else:
            raise BadInput(f"{path}: an example of this task is {as_text(spec)}: give {_fitting(types)}")
        number = 0
        for names, arrays in batches:
            number += len(names)
            yield names, tf.nest.pack_sequence_as(spec, [arrays[name] for name in types])
    except (OSError, EOFError, UnicodeDecodeError, zipfile.BadZipFile, csv.Error) as problem:
        raise BadInput(f"{path} cannot be read ({first_line(problem)})") from problem
    if not number:
        raise BadInput(f"{path} holds no examples")


def batches_in_memory(features: Any, spec: Any, size: int) -> Iterator[Batch]:
    """Yields examples that are in memory, as arrays [n, ...] in their structure. Raises BadInput as `read_batches`."""
    types = leaves(spec)
    arrays = {name: _as_array(each) for name, each in leaves(features).items()}
    if arrays.keys() != types.keys():
        raise BadInput(f"an example of this task is {as_text(spec)}, and these have {', '.join(arrays)}")
    for names, batch in _array_batches(arrays, types, size):
        yield names, tf.nest.pack_sequence_as(spec, [batch[name] for name in types])


def _as_array(values: Any) -> np.ndarray:
    """Returns values as an array; bytes in a list keep the zeros at their end, which NumPy's own type would drop."""
    are_bytes = isinstance(values, list | tuple) and any(isinstance(each, bytes) for each in values)
    return np.asarray(values, dtype=object if are_bytes else None)


def _is_single(types: dict[str, tf.TensorSpec], *, image: bool = False, text: bool = False) -> bool:
    """Returns whether an example is one tensor: an image as files have them, or a text."""
    if len(types) > 1:
        return False
    (leaf,) = types.values()
    is_image = leaf.shape.rank == 3 and leaf.dtype == tf.uint8 and leaf.shape[2] in (1, 3, 4)
    return (image and is_image) or (text and leaf.shape.rank == 0 and leaf.dtype == tf.string)


def _fitting(types: dict[str, tf.TensorSpec]) -> str:
    """Returns the inputs that hold such examples."""
    several = f"an .npz file with arrays {', '.join(types)}"
    found = [several if len(types) > 1 else "an .npy or .npz file as task.load_examples gives them"]
    if all(leaf.shape.rank in (0, 1) for leaf in types.values()):
        found.append("a .csv file with a header")
    if _is_single(types, text=True):
        found += ["a .tfrecord file", "a folder of images (whose paths are the examples)"]
    elif _is_single(types, image=True):
        found.append("a folder of images")
    return " or ".join(found)


# --- Arrays -----------------------------------------------------------------------------------------------------------


def _load_arrays(path: Path, types: dict[str, tf.TensorSpec]) -> dict[str, np.ndarray]:
    try:
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
        arrays = {name: loaded[name] for name in loaded} if isinstance(loaded, np.lib.npyio.NpzFile) else {"": loaded}
    except ValueError as problem:  # An array of Python objects, or no file of NumPy.
        what_to_do = ": save it as an array of numbers or texts" if "allow_pickle" in str(problem) else ""
        raise BadInput(f"{path} cannot be read ({first_line(problem)}){what_to_do}") from None
    if len(arrays) == len(types) == 1:
        return dict(zip(types, arrays.values(), strict=True))
    if missing := [name for name in types if name not in arrays]:
        raise BadInput(f"{path} has no array {missing[0]!r}: it needs {', '.join(types)} [n, ...], in an .npz file")
    return {name: arrays[name] for name in types}


def _array_batches(
    arrays: dict[str, np.ndarray], types: dict[str, tf.TensorSpec], size: int, what: str = ""
) -> Iterator[tuple[list[str], dict[str, np.ndarray]]]:
    for name, leaf in types.items():
        shape = arrays[name].shape
        if not shape or not leaf.shape.is_compatible_with(shape[1:]):
            wanted = ", ".join(map(str, ["n", *leaf.shape]))
            raise BadInput(f"{what}{name} is of shape {list(shape)}: it has to be [{wanted}], n examples")
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise BadInput(f"{what}the arrays are of different lengths: {lengths}")
    for first in range(0, max(lengths.values()), size):
        batch = {
            name: _cast(arrays[name][first : first + size], leaf.dtype, f"{what}{name}", first)
            for name, leaf in types.items()
        }
        yield [f"row {first + number}" for number in range(len(next(iter(batch.values()))))], batch


def _cast(array: np.ndarray, dtype: tf.DType, what: str, first: int) -> np.ndarray:
    """Returns the values as a dtype that can hold them: numbers with a point may lose digits only."""
    kinds = "USO" if dtype == tf.string else "b" if dtype == tf.bool else "biu" if dtype.is_integer else "biuf"
    if array.dtype.kind not in kinds:
        raise BadInput(f"{what} is of {array.dtype}: it has to be {dtype.name}")
    if dtype == tf.string:
        return array.astype(object)
    with np.errstate(over="ignore"):
        found = array.astype(dtype.as_numpy_dtype)
    changed = found != array if dtype.is_integer else np.isinf(found) & ~np.isinf(array)
    if changed.any():
        row = first + np.flatnonzero(changed.reshape(len(array), -1).any(axis=1))[0]
        raise BadInput(f"{what}, row {row}: a value does not fit into {dtype.name}")
    return found


# --- Rows -------------------------------------------------------------------------------------------------------------


def _row_batches(
    rows: Iterable[Row], types: dict[str, tf.TensorSpec], size: int
) -> Iterator[tuple[list[str], dict[str, np.ndarray]]]:
    batch: list[Row] = []
    for row in rows:
        if len(batch) == size or (batch and _shapes(row) != _shapes(batch[0])):
            yield _joined(batch, types)
            batch = []
        batch.append(row)
    if batch:
        yield _joined(batch, types)


def _shapes(row: Row) -> list[tuple[int, ...]]:
    return [np.shape(value) for value in row[1].values()]


def _joined(batch: list[Row], types: dict[str, tf.TensorSpec]) -> tuple[list[str], dict[str, np.ndarray]]:
    def dtype(leaf: tf.TensorSpec) -> Any:
        return object if leaf.dtype == tf.string else leaf.dtype.as_numpy_dtype

    names = [name for name, _ in batch]
    return names, {name: np.array([row[name] for _, row in batch], dtype(leaf)) for name, leaf in types.items()}


def _read_csv(path: Path, types: dict[str, tf.TensorSpec]) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file, strict=True)
        header = next(lines, [])
        if not header:
            raise BadInput(f"{path} is empty: it needs a header and a row for each example")
        if len(header) == 1 and ";" in header[0]:
            raise BadInput(f"{path} has one column, {header[0]!r}: separate the values by commas")
        columns = _columns(path, header, types)
        number = 0
        for line in lines:
            if not line:
                continue
            row = f"row {number} (line {lines.line_num})"
            if len(line) != len(header):
                raise BadInput(f"{path}, {row}: it has {len(line)} values, and the header has {len(header)}")
            values = {}
            for name, places in columns.items():
                found = [_parse(line[each], types[name].dtype, f"{path}, {row}, {header[each]!r}") for each in places]
                values[name] = found if types[name].shape.rank else found[0]
            yield f"row {number}", values
            number += 1


def _columns(path: Path, header: list[str], types: dict[str, tf.TensorSpec]) -> dict[str, list[int]]:
    """Returns in which columns each tensor is: under its name, a vector's under "name/0", "name/1" and so on."""
    wanted = {
        name: [f"{name}/{number}" for number in range(leaf.shape[0] or 0)] if leaf.shape.rank else [name]
        for name, leaf in types.items()
    }
    if len(types) == 1:  # Its name is ours, and may not be the file's.
        ((name, names),) = wanted.items()
        if not names or (len(names) == len(header) and not set(names) <= set(header)):
            if _are_numbers(header, types[name].dtype):
                raise BadInput(f"{path}: the first line looks like an example: add a header")
            return {name: list(range(len(header)))}
        if _is_single(types, text=True) and name not in header and "text" in header:
            return {name: [header.index("text")]}
    missing = [each for names in wanted.values() for each in names if each not in header]
    if missing:
        count = sum(map(len, wanted.values()))
        also = f", or give exactly {count} column{'s' * (count > 1)}" if len(types) == 1 else ""
        raise BadInput(f"{path} has no column {missing[0]!r}, only {', '.join(header)}: rename one{also}")
    return {name: [header.index(each) for each in names] for name, names in wanted.items()}


def _are_numbers(texts: list[str], dtype: tf.DType) -> bool:
    try:
        return bool([_parse(text, dtype, "") for text in texts]) and dtype != tf.string
    except BadInput:
        return False


def _parse(text: str, dtype: tf.DType, what: str) -> Any:
    if dtype == tf.string:
        return text
    try:
        if dtype == tf.bool:
            return {**dict.fromkeys(TRUE, True), **dict.fromkeys(FALSE, False)}[text.strip().lower()]
        number = int(text) if dtype.is_integer else np.float64(text)
        if dtype.min <= number <= dtype.max or "n" in text.lower():  # As in inf and nan.
            return number
    except (KeyError, ValueError):
        pass
    raise BadInput(f"{what}: {text!r} is not of type {dtype.name}")


def _read_records(path: Path, types: dict[str, tf.TensorSpec]) -> Iterator[Row]:
    (name,) = types
    path.open("rb").close()  # Whose error is a plainer one.
    records = iter(tf.data.TFRecordDataset(str(path), "GZIP" if path.suffix == ".gz" else ""))
    number = 0
    while True:
        try:
            record = next(records, None)
        except tf.errors.OpError as problem:
            raise BadInput(
                f"{path}, row {number}: the record is damaged or cut short ({first_line(problem)})"
            ) from problem
        if record is None:
            return
        yield f"row {number}", {name: record.numpy()}
        number += 1


def _read_folder(path: Path, types: dict[str, tf.TensorSpec]) -> Iterator[Row]:
    ((name, leaf),) = types.items()
    for file in sorted(each for each in path.rglob("*") if each.suffix.lower() in IMAGES):
        title = file.relative_to(path).as_posix()
        if leaf.dtype == tf.string:
            yield title, {name: str(file)}
            continue
        try:
            image = tf.io.decode_image(file.read_bytes(), channels=leaf.shape[2], expand_animations=False)
        except tf.errors.OpError as problem:
            raise BadInput(f"{file} cannot be decoded ({first_line(problem)})") from problem
        if not leaf.shape.is_compatible_with(image.shape):
            raise BadInput(f"{file} is of size {list(image.shape)}: examples are {list(leaf.shape)}; resize it")
        yield title, {name: image.numpy()}
