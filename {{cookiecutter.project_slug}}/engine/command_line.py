"""The command line of train.py, and the settings that a run has recorded. Imports no TensorFlow, so --help is quick."""

import contextlib
import dataclasses
import inspect
import io
import re
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro
from tyro import constructors
from tyro.constructors import MISSING_NONPROP, ConstructorRegistry, StructFieldSpec

from engine.errors import BadInput, end_at_signals, exit_codes, first_line, is_users, where_raised
from engine.files import read_json
from engine.settings import CONFIG, INIT_ONLY, PER_LAUNCH, SECTIONS, Settings, flag, marked, read_config

Kind = TypeVar("Kind", bound=Settings)
# These settings decide whether the defaults of the others come from a run or file.
SOURCES = ("run_dir", "fresh", "settings_from", "init_from", "export", "evaluate_only", "evaluate_continuously")


def check_command_line(kind: type[Settings]) -> None:
    """Reads the command line if the program is train.py, so that --help and wrong flags end it at once.

    From then on, an exception that ends the import of task.py is one line, too.
    """
    if Path(sys.argv[0]).name == "train.py":
        end_at_signals()
        sys.excepthook = _end_with_a_line
        with exit_codes():
            read_settings(kind)


def _end_with_a_line(kind: type[BaseException], problem: BaseException, trace: types.TracebackType | None) -> None:
    """Ends the program with an error in the user's code as one line, with any other as Python does."""
    with contextlib.suppress(ImportError), exit_codes():  # TensorFlow itself may be what cannot be imported.
        if is_users(problem):
            raise BadInput(f"{where_raised(problem)}: {first_line(problem)}") from problem
    sys.__excepthook__(kind, problem, trace)


def read_settings(kind: type[Kind], arguments: Sequence[str] | None = None) -> Kind:
    """Returns the settings that the command line gives; `kind` is the Config of config.py.

    When a run is evaluated or exported, its recorded settings are the defaults. `arguments` replaces the process's own.
    Raises BadInput if a flag or its value cannot be used, SystemExit if tyro has printed the help.
    """
    recorded: dict[str, Any] = {}
    hints = get_type_hints(kind)
    sources: Any = dataclasses.make_dataclass("Sources", [(name, hints[name], getattr(kind, name)) for name in SOURCES])
    with contextlib.suppress(SystemExit):  # The complete parser prints the help or the error.
        given, _ = tyro.cli(sources, args=arguments, return_unknown_args=True, console_outputs=False)
        recorded = _recorded(kind, given)
    with errors_in_one_line():
        values = _parse(kind, arguments, recorded)
    return kind(**values)


@contextlib.contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Turns an error that tyro prints, as a box of about ten lines, into a BadInput."""
    with contextlib.redirect_stderr(io.StringIO()) as written:
        try:
            yield
        except SystemExit as ended:
            if not ended.code:
                raise
            # A title, the problem, and perhaps flags with their help, with lines of "─" or "-" between them.
            box = re.sub(r"\x1b\[[\d;]*m|│", "", written.getvalue())
            parts = re.split(r"(?m)^\W*[─-]{3,}\W*$", box.partition("\n")[2])
            problem, *more = [*filter(str.strip, parts)] or [box]
            flags = re.findall(r"(?m)^ {5,6}(--[^=]*?) *$", "".join(more))
            problem = " ".join(problem.partition("Got errors:")[0].split()).removeprefix("Error parsing ").rstrip("!.")
            raise BadInput(f"{problem}: {'use ' + ' or '.join(flags) if flags else 'see --help'}") from None


def settings_of_run(kind: type[Kind], run_dir: Path) -> Kind:
    """Returns the settings with which the run in a directory is evaluated. Raises BadInput if there is no run."""
    if read_config(run_dir) is None:
        raise BadInput(f"{run_dir} contains no run ({CONFIG} is missing): pass the directory of a run")
    return read_settings(kind, [f"--run-dir={run_dir}", "--evaluate-only"])


def _parse(kind: type[Settings], arguments: Sequence[str] | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings on the command line, by name; those that it does not give are as in `defaults` or `kind`.

    Tyro shows a nested dataclass as a section of --help. Settings are flat, so a rule nests the fields of each section.
    """
    info = constructors.StructTypeInfo.make(kind, types.SimpleNamespace(**defaults), in_union_context=False)
    spec: Any = ConstructorRegistry.get_struct_spec(info)
    fields: dict[type, list[StructFieldSpec]] = {kind: []}
    section: type = kind
    for field in spec.fields:
        if field.name in SECTIONS:
            section = type(SECTIONS[field.name], (), {})
        fields.setdefault(section if field.name in Settings.__dataclass_fields__ else kind, []).append(field)
    _, *sections = fields
    for section in sections:
        nested: Any = Annotated[section, tyro.conf.OmitArgPrefixes]
        fields[kind].append(StructFieldSpec(section.__name__, nested, MISSING_NONPROP, ""))
    registry = ConstructorRegistry()

    @registry.struct_rule
    def in_sections(info: constructors.StructTypeInfo) -> constructors.StructConstructorSpec | None:
        return constructors.StructConstructorSpec(dict, tuple(fields[info.type])) if info.type in fields else None

    # With --no-SWITCH an evaluation can turn off a switch that the run has on.
    pairs = () if defaults else (tyro.conf.FlagCreatePairsOff,)
    values: Any = tyro.cli(kind, args=arguments, description=inspect.getdoc(kind), config=pairs, registry=registry)
    for section in sections:
        values |= values.pop(section.__name__)
    return values


def _recorded(kind: type[Settings], given: Any) -> dict[str, Any]:
    """Returns the recorded settings of the run to evaluate or export, or of --settings-from; {} for other commands."""
    excluded = marked(kind, PER_LAUNCH, INIT_ONLY)
    source = str(given.run_dir / CONFIG)
    recorded: dict[str, Any] = {}
    exports = given.export and not given.fresh
    if given.settings_from:
        source, recorded = _settings_from(kind, given.settings_from, excluded)
    elif exports or ((given.evaluate_only or given.evaluate_continuously) and not given.init_from):
        recorded = (read_config(given.run_dir) or {"settings": {}})["settings"]
    if exports:  # The run may first have to be trained to its end, with all settings that a resume needs.
        excluded = marked(kind, PER_LAUNCH)
    hints, values = get_type_hints(kind), {}
    for name, value in recorded.items():
        if name in hints.keys() - excluded:
            try:
                values[name] = _decoded(value, hints[name])
            except (ValueError, TypeError, AttributeError, KeyError) as problem:
                raise BadInput(f"{source}: {flag(name)} cannot be {value!r}: correct it there") from problem
    return values


def _settings_from(kind: type[Settings], path: Path, per_launch: set[str]) -> tuple[str, dict[str, Any]]:
    """Returns how messages name --settings-from, and its settings. Raises BadInput if they cannot be used."""
    file = path / CONFIG if path.is_dir() else path
    content = read_json(file) or {}
    settings = content.get("settings", {} if path.is_dir() else content)
    if not isinstance(settings, dict) or not settings:
        raise BadInput(f"--settings-from {file} contains no settings: restore it, or pass another run or file")
    known = {field.name for field in dataclasses.fields(kind)} - (per_launch if settings is content else set())
    if unknown := ", ".join(sorted(settings.keys() - known)):
        raise BadInput(
            f"--settings-from {file}: this project has no setting {unknown}, or it belongs to a single launch: remove "
            "it from a copy of the file"
        )
    return f"--settings-from {file}", settings


def _decoded(value: Any, hint: Any) -> Any:
    """Returns a JSON value as a setting of the type `hint`, as tyro reads it from the words of a command line."""
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        hints = get_type_hints(hint)
        return hint(**{name: _decoded(part, hints[name]) for name, part in value.items()})
    spec: Any = ConstructorRegistry.get_primitive_spec(constructors.PrimitiveTypeInfo.make(hint, set()))
    words = _words(value)
    if (spec.choices and not {*words} <= {*spec.choices}) or spec.nargs not in ("*", len(words)):
        raise ValueError(value)
    return spec.instance_from_str(words)


def _words(value: Any) -> list[str]:
    if isinstance(value, dict):
        value = [part for pair in value.items() for part in pair]
    return [word for part in value for word in _words(part)] if isinstance(value, list) else [str(value)]
