"""The engine's settings, their rules, and the command line. Imports no TensorFlow, so that --help is quick."""

import contextlib
import dataclasses
import importlib.util
import inspect
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import tyro

from engine.errors import BadInput, end_at_signals, exit_codes

CONFIG = "config.json"  # In a run's directory: its settings, and what else it was begun with.
LARGEST = 2**31 - 1  # Whole numbers become tensors of 32 bits.

# A run that is resumed or evaluated needs the settings it was begun with, except those that are marked:
Value = TypeVar("Value")
ON_RESUME, ON_EVALUATION = "may differ when a run is resumed", "may differ when a run is evaluated"
UNLESS_GIVEN = "is the run's own when it is evaluated, unless the command line gives another"
MayChange = Annotated[Value, ON_RESUME]
EachStart = Annotated[Value, ON_RESUME, ON_EVALUATION]  # It says how this program runs, and not what the run is.
FirstStart = Annotated[Value, ON_EVALUATION]  # It says how the run began.
EachEvaluation = Annotated[Value, ON_EVALUATION, UNLESS_GIVEN]

INSTEAD_OF_TRAINING = tyro.conf.create_mutex_group(required=False, title="Instead of training")
# The sections of --help, by their first setting.
SECTIONS = {
    "run_dir": "Run",
    "epochs": "Training",
    "monitor": "Validation",
    "checkpoint_every_steps": "Checkpoint",
    "keep_last_batch": "Data",
    "eager": "Debugging",
    "strategy": "Device",
    "precision": "Arithmetic",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What Config has besides the settings of the task. The text below a setting is its text in --help."""

    run_dir: EachStart[Path] = Path("runs/default")
    """Everything the run writes goes here. A directory that holds a run resumes it."""
    fresh: EachStart[bool] = False
    """Move the run in --run-dir aside (to runs/default.1) and start anew."""
    like: EachStart[Path | None] = None
    """Another run, or a JSON file of settings: what the command line leaves out is as there. Not what says how this
    program runs, such as --run-dir and the devices."""
    init_from: FirstStart[Path | None] = None
    """Begin with the weights of another run, of a .weights.h5 or .keras file, or of a tf.train.Checkpoint."""
    init_partial: FirstStart[bool] = False
    """Load only the weights that --init-from and the model, or one of its layers, have in common."""
    profile: EachStart[bool] = False
    """Write a TensorBoard profile of a few training steps."""
    export: EachStart[bool] = False
    """Write the best weights to export/, for Keras and as a SavedModel. A run is trained to its end first."""
    export_format: EachStart[Literal["litert", "onnx"] | None] = None
    """What Keras is to write beside them, with --export."""
    check: EachStart[Annotated[bool, INSTEAD_OF_TRAINING]] = False
    """Check your hooks on a few batches, report what to fix, and exit."""
    evaluate_only: EachStart[Annotated[bool, INSTEAD_OF_TRAINING]] = False
    """Print the metrics of the run's best weights, or of --init-from, with the run's settings. Write nothing."""
    evaluate_continuously: EachStart[Annotated[bool, INSTEAD_OF_TRAINING]] = False
    """Validate each checkpoint of the run in --run-dir, with its settings, as it appears, until the run ends."""
    compare: EachStart[Annotated[tuple[Path, ...] | None, INSTEAD_OF_TRAINING]] = None
    """Compare the runs in these directories: a table, and curves in comparison.png in the current folder."""

    epochs: MayChange[int]
    """Passes over the examples, or --steps-per-epoch each. More of them continue a finished run, with its schedule
    stretched to all."""
    steps_per_epoch: int | None = None
    """Length of an epoch. Passes over the examples then follow each other without a gap. Default: one pass."""
    global_batch_size: int
    """Examples per step, over all replicas together. The number of replicas has to divide it."""
    learning_rate: MayChange[float]
    """Peak learning rate of the optimizer. A run may be resumed with another one, which is recorded."""
    seed: int = 0
    """Fixes the initial weights, the order of the examples, and the augmentation."""
    micro_batches: int = 1
    """Compute a replica's share of a batch in this many parts, one after the other, for one update: less memory."""
    clip_norm: float | None = None
    """Limit to the global norm of the gradients, after their sum over the replicas."""
    ema_decay: float | None = None
    """Validate, test and keep a moving average of the weights: average <- decay * average + (1 - decay) * weights."""

    monitor: str = "validation/loss"
    """The metric that decides which weights are best. Those are tested after the last epoch."""
    monitor_direction: Literal["auto", "min", "max"] = "auto"
    """Whether lower or higher is better. auto: by the metric."""
    patience: MayChange[int | None] = None
    """Stop after this many epochs without a better --monitor."""
    validate_every_steps: int | None = None
    """Validate at every multiple of this many steps too, besides at the end of each epoch."""
    evaluation_batch_size: EachEvaluation[int | None] = None
    """Examples per step of validation and test. The number of replicas has to divide it. Default: the global batch."""
    evaluation_timeout: EachStart[float] = 3600.0
    """Seconds without a new checkpoint after which --evaluate-continuously ends."""

    checkpoint_every_steps: MayChange[int | None] = None
    """Save at every multiple of this many steps too, besides at the end of each epoch."""
    keep_checkpoints: MayChange[int] = 3
    """Number of newest checkpoints to keep. The best weights are kept beside them."""
    async_checkpoints: MayChange[bool] = False
    """Write checkpoints in a background thread. Needs memory for one more copy of the state."""

    keep_last_batch: bool = False
    """Train on the short last batch of an epoch too, padded with examples of weight 0. Otherwise it is left out."""
    shuffle_megabytes: int = 512
    """Memory in one process for shuffling a split that does not fit into memory; of record files, in all processes."""
    pad_to: tuple[int, ...] = ()
    """Lengths for sequences whose first size differs: each batch is padded with zeros to the smallest that holds it."""

    eager: EachStart[bool] = False
    """Run the hooks in Python: print and breakpoint() work in them, on one replica best. Slow."""
    limit_steps: EachEvaluation[int | None] = None
    """Take at most this many steps of every epoch, validation and test: a whole run in seconds."""

    strategy: EachStart[Literal["auto", "one_device", "mirrored", "multi_worker", "tpu", "parameter_server"]] = "auto"
    """one_device: a single GPU, or the CPU.
    mirrored: a copy of the model on each GPU, or simulated device.
    multi_worker: the same over several processes.
    auto: multi_worker if TF_CONFIG, Slurm or Kubernetes describes a cluster, otherwise mirrored or one_device.
    tpu: not measured.
    parameter_server: asynchronous, so its numbers differ. TensorFlow does not support it with Keras 3."""
    simulated_devices: EachStart[int] = 0
    """Train on N logical CPU devices, to try distribution on any machine. 0: real devices."""
    all_reduce: EachStart[Literal["auto", "nccl", "hierarchical_copy", "one_device"]] = "auto"
    """How gradients are summed over the GPUs of one machine. auto: NCCL; if it hangs, try the others (not measured)."""
    steps_per_execution: EachStart[Literal["auto"] | int] = "auto"
    """Steps run in the graph per return to Python. auto: about a second's worth. Changes no number."""
    cluster_timeout: EachStart[float] = 300.0
    """Seconds to wait for the other processes of a cluster at start-up."""

    precision: Literal["float32", "mixed_bfloat16", "mixed_float16"] = "float32"
    """Arithmetic of the layers; variables stay float32. mixed_float16 scales the loss, alike on all replicas."""
    jit: bool = False
    """Compile forward and backward pass with XLA."""
    deterministic: bool = False
    """Use deterministic kernels, without TF32 (slower). Only GPUs should need it; not measured there."""

    def __post_init__(self) -> None:
        """Raises BadInput for the first value that breaks its rule."""
        counts = ("epochs", "global_batch_size", "micro_batches", "keep_checkpoints", "shuffle_megabytes")
        counts += ("steps_per_epoch", "evaluation_batch_size", "limit_steps")
        counts += ("patience", "validate_every_steps", "checkpoint_every_steps", "steps_per_execution")
        for name in counts:
            if getattr(self, name) not in (None, "auto"):
                self._require_range(name, 1, LARGEST)
        rises = list(self.pad_to) == sorted({each for each in self.pad_to if 1 <= each <= LARGEST})
        self._require("pad_to", rises, "must be rising whole numbers above 0")
        self._require_range("seed", 0, LARGEST)
        self._require_range("simulated_devices", 0, 1024)
        for name in ("learning_rate", "clip_norm", "cluster_timeout", "evaluation_timeout"):
            value = getattr(self, name)
            self._require(name, value is None or 0 < value < math.inf, "must be a finite number above 0")
        self._require("cluster_timeout", self.cluster_timeout <= 1e9, "must be at most 1e9")  # Timers end there.
        self._require("ema_decay", self.ema_decay is None or 0 < self.ema_decay < 1, "must be between 0 and 1")
        self._require("init_partial", not self.init_partial or self.init_from is not None, "needs --init-from")
        self._require("fresh", not (self.fresh and self.evaluates), "leaves no run to evaluate")
        self._require("compare", self.compare != (), "needs directories of runs")
        self._require("fresh", not (self.fresh and self.compare), "cannot be combined with --compare")
        trains = not (self.check or self.evaluates or self.compare)
        rule = "cannot be combined with --check, --evaluate-only, --evaluate-continuously or --compare"
        self._require("export", trains or not self.export, rule)
        if self.eager:
            for name in ("jit", "check", "export"):
                self._require(name, not getattr(self, name), "compiles the hooks, and --eager does not: leave one out")
            own = self.strategy in ("multi_worker", "tpu", "parameter_server")
            self._require("strategy", not own, "cannot be combined with --eager, which is for one process")
        rule = "cannot be combined with --export, --evaluate-only or --evaluate-continuously, which take the run's own"
        self._require("like", not self.like or not (self.export or self.evaluates), rule)
        self._require("export_format", self.export or self.export_format is None, "needs --export")
        if self.export_format == "onnx":
            missing = [name for name in ("onnx", "tf2onnx") if not importlib.util.find_spec(name)]
            self._require("export_format", not missing, f"needs packages: pip install {' '.join(missing)}")
        for each in dataclasses.fields(self):  # Yours too.
            value = getattr(self, each.name)
            if isinstance(value, int):
                self._require(each.name, -(2**63) <= value < 2**63, "must fit into 64 bits")
            elif isinstance(value, float):
                self._require(each.name, not math.isnan(value), "must be a number")  # No run would equal itself.
            elif isinstance(value, str | Path):  # TensorFlow and JSON take no other text.
                if isinstance(value, Path):
                    check_is_local(_flag(each.name), value, is_yours=each.name not in Settings.__dataclass_fields__)
                is_utf8 = str(value).encode(errors="ignore").decode() == str(value)
                self._require(each.name, is_utf8, "must be text in UTF-8")

    def _require_range(self, name: str, smallest: int, largest: int) -> None:
        holds = smallest <= getattr(self, name) <= largest
        self._require(name, holds, f"must be from {smallest} to {largest}")

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            value = getattr(self, name)
            value = " ".join(map(str, value)) if isinstance(value, tuple) else value
            raise BadInput(f"{_flag(name)} {rule}" if value is True else f"{_flag(name)} {value} {rule}")

    @property
    def evaluates(self) -> bool:
        """Whether a run is evaluated, not trained."""
        return self.evaluate_only or self.evaluate_continuously

    def as_json(self) -> dict[str, Any]:
        """Returns the settings as config.json holds them; what JSON has no form for becomes text."""
        return _as_json(dataclasses.asdict(self))

    def differences(self, recorded: Mapping[str, Any]) -> list[str]:
        """Returns what differs from the settings that a run has recorded, although it has to be the same."""
        settings = self.as_json()
        free = _marked(type(self), ON_RESUME) | (_marked(type(self), ON_EVALUATION) if self.evaluates else set())
        return [
            f"{_flag(name)} {recorded.get(name, 'not recorded')} there and {settings.get(name, 'no setting')} now"
            for name in {**recorded, **settings}
            if name not in free and recorded.get(name) != settings.get(name)
        ]


def check_is_local(name: str, path: Path, *, is_yours: bool = False) -> None:
    """Raises BadInput if a path is the address of a bucket: "gs://bucket/run", of which pathlib makes gs:/bucket/run.

    Args:
        name: what the path is given as: "--run-dir".
        path: what was given.
        is_yours: whether it is a setting of the task, which may go to TensorFlow if it is text.
    """
    if address := re.fullmatch(r"([A-Za-z][\w+.-]+:)/+(.*)", str(path)):
        rule = "is no place in a file system: mount the bucket, and give the folder, or give another one"
        if is_yours:
            rule = "is changed by pathlib: declare the setting as str, and TensorFlow gets it as it is"
        raise BadInput(f"{name} {address[1]}//{address[2]} {rule}")


def check_command_line(kind: type[Settings]) -> None:
    """Reads the command line before TensorFlow is imported, so that --help and mistakes end the program at once.

    From then on, a mistake in task.py that ends its import is one line too.
    """
    end_at_signals()
    sys.excepthook = _end_with_a_line
    with exit_codes():
        read_settings(kind)


def _end_with_a_line(kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> None:
    """Prints a mistake of the user's as one line, and ends the program; prints anything else as Python does."""
    with contextlib.suppress(ImportError):  # Of TensorFlow, for example.
        from engine.mistakes import first_line, is_users, where_raised

        if isinstance(problem, Exception) and is_users(problem):
            with exit_codes():
                raise BadInput(f"{where_raised(problem)}: {first_line(problem)}") from problem
    sys.__excepthook__(kind, problem, trace)


def read_settings(kind: type[Settings], arguments: Sequence[str] | None = None) -> Any:
    """Returns the settings that the command line gives, as a `kind`, which is the Config of config.py.

    To evaluate or export a run, what the command line leaves out is as the run has recorded it. `arguments` replaces
    the process's own.

    Raises:
        BadInput: a value breaks its rule.
        SystemExit: tyro has printed the help (code 0), or what it does not understand (code 2).
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    recorded = _arguments_of_run(kind, given)
    found = tyro.cli(
        _in_sections(kind),
        args=[*recorded, *given],  # If one is given twice, the last one counts.
        description=inspect.cleandoc(kind.__doc__ or ""),
        # A switch that a run has on can be taken back in its evaluation.
        config=() if recorded else (tyro.conf.FlagCreatePairsOff,),
    )
    return kind(**_flat(found))


def settings_of_run(kind: type[Settings], run_dir: Path) -> Any:
    """Returns the settings of the run in a directory, as its evaluation has them. Raises BadInput if there is none."""
    check_is_local("RUN_DIR", run_dir)
    if run_dir.exists() and not run_dir.is_dir():
        raise BadInput(f"{run_dir} is no directory: give the directory of a run")
    if recorded_settings(run_dir) is None:
        raise BadInput(f"{run_dir} holds no run (no {CONFIG}): give the directory of one")
    return read_settings(kind, [f"--run-dir={run_dir}", "--evaluate-only"])


def recorded_settings(run_dir: Path) -> dict[str, Any] | None:
    """Returns the settings of config.json, or None if there is no such file. Raises BadInput if it holds none."""
    recorded = read_json(run_dir / CONFIG)
    if recorded is None:
        return None
    if not isinstance(recorded.get("settings"), dict):
        raise BadInput(f"{run_dir / CONFIG} holds no settings: restore it, or use --fresh")
    return recorded["settings"]


def read_json(path: Path, flag: str | None = None) -> dict[str, Any] | None:
    """Returns the JSON object in `path`, or None if there is no such file.

    Raises BadInput, which names the flag that the path was given with, if it is none.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(value, dict):
            return value
        problem = f"it holds a {type(value).__name__}"
    except FileNotFoundError:
        return None
    except (ValueError, OSError, RecursionError) as error:
        problem = str(error)
    if flag:
        raise BadInput(f"{flag} {path} is no JSON object ({problem}): give the directory of a run, or such a file")
    raise BadInput(f"{path} is not the JSON that a run writes ({problem}): restore it, or use --fresh")


def _flag(name: str) -> str:
    """Returns the command-line spelling of a setting: "run_dir" -> "--run-dir"."""
    return "--" + name.replace("_", "-")


def _hints(kind: type[Settings]) -> dict[str, Any]:
    """Returns the types of the settings; the engine's keep their marks when config.py declares them again."""
    return get_type_hints(kind, include_extras=True) | get_type_hints(Settings, include_extras=True)


def _marked(kind: type[Settings], mark: str) -> set[str]:
    return {name for name, hint in _hints(kind).items() if mark in getattr(hint, "__metadata__", ())}


def _in_sections(kind: type[Settings]) -> type:
    """Returns a dataclass that takes the user's settings, and has a field for each section of the engine's."""
    engine = [each.name for each in dataclasses.fields(Settings)]
    starts = [engine.index(first) for first in SECTIONS]
    sections = []
    for title, start, end in zip(SECTIONS.values(), starts, [*starts[1:], None], strict=True):
        how = (tyro.conf.OmitArgPrefixes, tyro.conf.arg(name=title, help=""))
        sections.append((f"section_{start}", Annotated[_with_only(kind, engine[start:end]), *how]))
    return _with_only(kind, [each.name for each in dataclasses.fields(kind) if each.name not in engine], *sections)


def _with_only(kind: type[Settings], names: Sequence[str], *more: tuple[str, Any]) -> type:
    """Returns a dataclass that takes only some of the settings, and more, and has no rules."""
    hints, fields = _hints(kind), []
    for each in dataclasses.fields(kind):
        if each.name in names and each.init:
            field = dataclasses.field(default=each.default, default_factory=each.default_factory)
        else:
            field = dataclasses.field(default=None, init=False)
        fields.append((each.name, hints[each.name], field))
    options = {"namespace": {"__post_init__": lambda self: None}, "frozen": True, "kw_only": True}
    # As a subclass, so that tyro finds the texts below the settings.
    return dataclasses.make_dataclass(kind.__name__, [*fields, *more], bases=(kind,), **options)


def _flat(parsed: Settings) -> dict[str, Any]:
    """Returns the values that a dataclass was given, those of its sections too."""
    values = {}
    for each in dataclasses.fields(parsed):
        value = getattr(parsed, each.name)
        if isinstance(value, Settings):
            values |= _flat(value)
        elif each.init:
            values[each.name] = value
    return values


def _arguments_of_run(kind: type[Settings], given: list[str]) -> list[str]:
    """Returns the settings of the run to evaluate, to export or to be --like as arguments; none without such a run."""
    asked = ("run_dir", "init_from", "fresh", "evaluate_only", "evaluate_continuously", "export", "like")
    asking = _with_only(kind, asked)
    try:
        asked, _ = tyro.cli(asking, args=given, return_unknown_args=True, console_outputs=False)
    except SystemExit:
        return []  # `read_settings` prints the help, or what is wrong.
    if asked.like:
        return _as_arguments(kind, _settings_like(kind, asked.like))
    if (asked.export and not asked.fresh) or (asked.evaluates and not asked.init_from):
        # A run that is exported may first have to be trained to its end.
        not_the_runs = _marked(kind, ON_EVALUATION) - _marked(kind, UNLESS_GIVEN)
        if asked.export:
            not_the_runs &= _marked(kind, ON_RESUME)
        recorded = recorded_settings(asked.run_dir) or {}
        return _as_arguments(kind, {name: recorded[name] for name in recorded.keys() - not_the_runs})
    return []


def _settings_like(kind: type[Settings], path: Path) -> dict[str, Any]:
    """Returns the settings of another run, or of a JSON file, without those that say how a program runs.

    Raises:
        BadInput: there are none, or they are not those of `kind`.
    """
    check_is_local("--like", path)
    file = path / CONFIG if path.is_dir() else path
    found = read_json(file, "--like")
    if found is None:
        raise BadInput(f"--like {path}: there is no {file}: give the directory of a run, or a JSON file of settings")
    of_run = isinstance(found.get("settings"), dict)
    settings = found["settings"] if of_run else found
    known = {each.name for each in dataclasses.fields(kind) if each.init}
    if unknown := sorted(settings.keys() - known):
        raise BadInput(
            f"--like {path}: this project has no setting {', '.join(unknown)}: give a copy of {file.name} without it"
        )
    own = _marked(kind, ON_EVALUATION) - _marked(kind, UNLESS_GIVEN)
    if not of_run and (given := sorted(settings.keys() & own)):
        raise BadInput(f"--like {path}: {_flag(given[0])} says how a program runs: give it on the command line")
    return {name: value for name, value in settings.items() if name not in own}


def _as_arguments(kind: type, recorded: Mapping[str, Any], prefix: str = "--") -> list[str]:
    """Returns the arguments that give the fields of a dataclass their recorded values, where these are no defaults."""
    arguments, hints = [], get_type_hints(kind)
    for each in dataclasses.fields(kind):
        name, value, hint = each.name.replace("_", "-"), recorded.get(each.name), hints[each.name]
        has_default = each.default is not dataclasses.MISSING
        if each.name not in recorded or (has_default and value == _as_json(each.default)):
            continue
        if dataclasses.is_dataclass(hint) and isinstance(value, dict):
            arguments += _as_arguments(hint, value, f"{prefix}{name}.")
        elif isinstance(value, bool) and hint is bool and has_default:
            arguments.append(f"{prefix}{'' if value else 'no-'}{name}")
        elif isinstance(value, dict | list):
            arguments += [f"{prefix}{name}", *_texts(value)]
        else:
            arguments.append(f"{prefix}{name}={value}")
    return arguments


def _texts(value: Any) -> list[str]:
    """Returns a JSON value as words of a command line."""
    if isinstance(value, dict):
        value = [part for pair in value.items() for part in pair]
    return [text for part in value for text in _texts(part)] if isinstance(value, list) else [str(value)]


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
