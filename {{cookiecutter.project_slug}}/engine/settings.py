"""The engine's settings and their rules; engine/command_line.py reads them. Imports no TensorFlow."""

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import tyro

from engine.errors import BadInput
from engine.files import read_json

CONFIG = "config.json"  # In a run directory: the settings and versions that the run started with.
LARGEST = 2**31 - 1  # Integers become tensors of 32 bits.
LONGEST_NAME = 255  # Bytes of a file's name; Linux, macOS and Windows accept no more.

# A run that is resumed or evaluated needs the settings it started with, except those with one of these marks.
Value = TypeVar("Value")
ON_RESUME, PER_LAUNCH, INIT_ONLY, IN_EVALUATION = "on resume", "per launch", "init only", "in evaluation"
ChangeableOnResume = Annotated[Value, ON_RESUME]
PerLaunch = Annotated[Value, PER_LAUNCH]  # Describes how this program runs, not what the run is.
InitOnly = Annotated[Value, INIT_ONLY]  # Describes how the run started.
ChangeableInEvaluation = Annotated[Value, IN_EVALUATION]  # The run's value, unless the command line gives another.

INSTEAD_OF_TRAINING = tyro.conf.create_mutex_group(required=False, title="Instead of training")
# The sections of --help, each by its first setting.
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
    """The settings that Config has besides the task's own. The text below a setting is its text in --help."""

    run_dir: PerLaunch[Path] = Path("runs/default")
    """Directory for everything the run writes. If it contains a run, that run is resumed."""
    fresh: PerLaunch[bool] = False
    """Move the run in --run-dir aside (to runs/default.1) and start over."""
    settings_from: PerLaunch[Path | None] = None
    """Take defaults from another run or a JSON file; flags override them. Launch settings such as --run-dir are not
    copied."""
    init_from: InitOnly[Path | None] = None
    """Start with the weights of another run, of a .weights.h5 or .keras file, or of a tf.train.Checkpoint."""
    init_partial: InitOnly[bool] = False
    """Load only the weights that --init-from and the model have in common."""
    profile: PerLaunch[bool] = False
    """Write a TensorBoard profile of a few training steps."""
    export: PerLaunch[bool] = False
    """Write the best weights to export/, for Keras and as a SavedModel. A run is trained to its end first."""
    check: PerLaunch[Annotated[bool, INSTEAD_OF_TRAINING]] = False
    """Check your hooks on a few batches, report what to fix, and exit."""
    evaluate_only: PerLaunch[Annotated[bool, INSTEAD_OF_TRAINING]] = False
    """Print the metrics of the run's best weights, or of --init-from, with the run's settings. The run stays as is."""
    evaluate_continuously: PerLaunch[Annotated[float | None, INSTEAD_OF_TRAINING]] = None
    """Validate each new checkpoint of the run in --run-dir, with the run's settings, until the run ends, or until there
    was no new one for this many seconds."""
    compare: PerLaunch[Annotated[tuple[Path, ...] | None, INSTEAD_OF_TRAINING]] = None
    """Compare the runs in these directories in a table."""

    epochs: ChangeableOnResume[int]
    """Epochs of one pass over the examples, or of --steps-per-epoch. A larger number continues a finished run, with its
    schedule stretched over all epochs."""
    steps_per_epoch: int | None = None
    """Steps per epoch. Passes over the examples then follow each other without a gap. Default: one pass."""
    global_batch_size: int
    """Examples per step, over all replicas together. If these cannot share it equally, some get padding of weight 0."""
    learning_rate: ChangeableOnResume[float]
    """Peak learning rate of the optimizer. May be changed when a run is resumed; the change is recorded."""
    seed: int = 0
    """Determines the initial weights, the order of the examples, and the augmentation."""
    micro_batches: int = 1
    """Split each replica's batch into this many micro-batches and accumulate their gradients, to save memory."""
    global_clipnorm: float | None = None
    """Limit of the global norm of the gradients, after their sum over the replicas."""
    lazy_rows: tuple[str, ...] | None = None
    """Names, or parts of them, of embedding tables of which a step changes only the rows that it looks up, although the
    optimizer would change all. The results differ from the optimizer's own: see docs/tables.md."""
    ema_decay: float | None = None
    """Validate, test and keep a moving average of the weights: average <- decay * average + (1 - decay) * weights.
    After n steps the decay is at most (1 + n) / (10 + n), so that the initial weights do not count for long."""

    monitor: str = "validation/loss"
    """The metric that decides which weights are best. The best weights are tested after the last epoch."""
    monitor_direction: Literal["auto", "min", "max"] = "auto"
    """Whether a lower (min) or a higher (max) value is better. auto: as Keras knows it of the metric."""
    patience: ChangeableOnResume[int | None] = None
    """Stop after this many epochs without a better --monitor."""
    validate_every_steps: int | None = None
    """Validate at every multiple of this many steps, in addition to the end of each epoch."""
    evaluation_batch_size: ChangeableInEvaluation[int | None] = None
    """Examples per step of validation and test, over all replicas together. Default: --global-batch-size."""

    checkpoint_every_steps: ChangeableOnResume[int | None] = None
    """Save at every multiple of this many steps, in addition to the end of each epoch."""
    keep_checkpoints: ChangeableOnResume[int] = 3
    """Number of newest checkpoints to keep. The best weights are kept beside them."""

    keep_last_batch: bool = False
    """Train on the short last batch of a pass too, padded with examples of weight 0. By default it is dropped."""
    shuffle_megabytes: int = 512
    """Megabytes for shuffling. A dataset of static shapes of up to 512 MiB is cached instead. Other datasets take this
    much in each process, record files over all processes together."""
    pad_to: tuple[int, ...] | None = None
    """Lengths for sequences of different lengths: each batch is padded with zeros to the smallest one that fits."""
    allow_changed_data: PerLaunch[bool] = False
    """Resume although load_examples or data_files returns other data than before; a pass over them that had not ended
    starts over."""

    eager: PerLaunch[bool] = False
    """Run the hooks in Python, so that print() and breakpoint() work in them, best on one replica. Slow."""
    limit_steps: ChangeableInEvaluation[int | None] = None
    """Take at most this many steps of every epoch, validation and test: a complete run in seconds."""

    strategy: PerLaunch[Literal["auto", "one_device", "mirrored", "multi_worker", "tpu", "parameter_server"]] = "auto"
    """one_device: a single GPU, or the CPU.
    mirrored: a copy of the model on each GPU, or simulated device.
    multi_worker: the same over several processes.
    auto: multi_worker if TF_CONFIG, Slurm or Kubernetes describes a cluster, otherwise mirrored or one_device.
    tpu: untested.
    parameter_server: asynchronous, so its results differ. TensorFlow does not support it with Keras 3."""
    simulated_devices: PerLaunch[int] = 0
    """Train on N logical CPU devices, to try distribution on any machine. 0: real devices."""
    all_reduce: PerLaunch[Literal["auto", "nccl", "hierarchical_copy", "one_device"]] = "auto"
    """How gradients are summed over the GPUs of one machine. auto: NCCL; if it hangs, try the others (untested)."""
    steps_per_execution: PerLaunch[Literal["auto"] | int] = "auto"
    """Steps per call of the compiled function. auto: about one second, five in a cluster. Does not affect
    results."""
    cluster_timeout: PerLaunch[float] = 300.0
    """Seconds to wait for the other processes of a cluster at start-up."""

    precision: Literal["float32", "mixed_bfloat16", "mixed_float16"] = "float32"
    """Arithmetic of the layers; variables stay float32. mixed_float16 scales the loss, equally on all replicas."""
    jit: bool = False
    """Compile forward and backward pass with XLA."""
    deterministic: bool = False
    """Use deterministic kernels, without TF32 (slower). Only GPUs need it."""

    def __post_init__(self) -> None:
        """Raises BadInput for the first value that breaks its rule."""
        for name, is_kept, rule in self._rules():
            if not is_kept:
                value = getattr(self, name)
                value = " ".join(map(str, value)) if isinstance(value, tuple) else value
                raise BadInput(f"{flag(name)} {rule}" if value is True else f"{flag(name)} {value} {rule}")

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yields a setting, whether its value keeps a rule, and the rule."""
        hints = {**get_type_hints(type(self)), **get_type_hints(Settings)}  # --check makes some of ours None.
        for name, value in vars(self).items():
            is_engines = name in Settings.__dataclass_fields__
            yield name, is_engines or not hasattr(Settings, name), "needs another name in config.py"
            yield name, not is_engines or value != (), "needs at least one value"
            if isinstance(hint := hints[name], type):  # Unions and generic types are left to tyro.
                fits = isinstance(value, int | float if hint is float else hint)
                yield name, fits, f"must be of the type that it has in config.py, {hint.__name__}"
            for part in value if isinstance(value, tuple) else (value,):
                yield name, not (rule := broken_rule(part)), rule
                if isinstance(part, Path):
                    check_is_local(flag(name), part)
                # The engine's numbers are counts and amounts.
                if is_engines and type(part) is int:
                    least, most = {"seed": (0, LARGEST), "simulated_devices": (0, 1024)}.get(name, (1, LARGEST))
                    yield name, least <= part <= most, f"must be from {least} to {most}"
                if is_engines and isinstance(part, float):
                    rule = "must be a positive number of float32, from 1.2e-38 to 3.4e+38"
                    yield name, 1.2e-38 <= part <= 3.4e38, rule
        lengths = self.pad_to or ()
        yield "pad_to", [*lengths] == sorted({*lengths}), "must be positive integers in increasing order"
        yield "cluster_timeout", self.cluster_timeout <= 1e9, "must be at most 1e9"  # Python's timers take no more.
        yield "ema_decay", self.ema_decay is None or 0 < self.ema_decay < 1, "must be between 0 and 1"
        yield "init_partial", not self.init_partial or self.init_from is not None, "needs --init-from"
        yield "fresh", not (self.fresh and (self.evaluates or self.compare)), "leaves no run to evaluate: remove it"
        rule = "cannot be combined with --check, --evaluate-only, --evaluate-continuously or --compare"
        yield "export", not (self.export and (self.check or self.evaluates or self.compare)), rule
        rule = "cannot be combined with --export, --evaluate-only or --evaluate-continuously: they use the run's own"
        yield "settings_from", not (self.settings_from and (self.export or self.evaluates)), rule
        for name in ("jit", "check", "export"):
            rule = "compiles the hooks, which --eager does not: remove one of the two"
            yield name, not (self.eager and getattr(self, name)), rule
        several = self.strategy in ("multi_worker", "tpu", "parameter_server")
        yield "strategy", not (self.eager and several), "cannot be combined with --eager, which is for one process"

    @property
    def evaluates(self) -> bool:
        """Whether a run is evaluated, not trained."""
        return self.evaluate_only or self.evaluate_continuously is not None

    def as_json(self) -> dict[str, Any]:
        """Returns the settings as config.json contains them; values that JSON cannot represent become text."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))

    def differences(self, recorded: Mapping[str, Any]) -> list[str]:
        """Returns a text for each setting that must equal the recorded one of a run, and does not."""
        settings = self.as_json()
        free = marked(type(self), ON_RESUME, PER_LAUNCH, *((INIT_ONLY, IN_EVALUATION) if self.evaluates else ()))
        return [
            f"{flag(name)} {recorded.get(name, 'not recorded')} there and {settings.get(name, 'no setting')} now"
            for name in {**recorded, **settings}
            if name not in free and recorded.get(name) != settings.get(name)
        ]


def flag(name: str) -> str:
    """Returns the command-line spelling of a setting: "run_dir" -> "--run-dir"."""
    return "--" + name.replace("_", "-")


def marked(kind: type[Settings], *marks: str) -> set[str]:
    """Returns the settings with one of the marks; the engine's keep theirs when config.py declares them again."""
    hints = get_type_hints(kind, include_extras=True) | get_type_hints(Settings, include_extras=True)
    return {name for name, hint in hints.items() if {*marks} & {*getattr(hint, "__metadata__", ())}}


def broken_rule(value: Any) -> str:
    """Returns the rule that a value of any setting breaks, or ""."""
    # TensorFlow, JSON and file systems accept no other text.
    if str(value).encode(errors="ignore").decode() != str(value) or "\0" in str(value):
        return "must be text in UTF-8 without null characters"
    if type(value) is int and not -(2**63) <= value < 2**63:
        return "must fit into 64 bits"
    return "" if value == value else "must not be NaN"  # noqa: PLR0124 - A resumed run would not match its settings.


def check_is_local(name: str, path: Path) -> None:
    """Raises BadInput if a path, given by `name`, cannot be one of this machine."""
    if (expanded := os.path.expanduser(path)) != str(path):  # A shell does not expand "--run-dir=~/x".
        raise BadInput(f"{name} {path} starts with ~, which only a shell expands: pass {expanded}")
    if too_long := [part for part in path.parts if len(os.fsencode(part)) > LONGEST_NAME]:
        raise BadInput(f"{name} contains a name of more than {LONGEST_NAME} bytes ({too_long[0][:20]}...): shorten it")
    # pathlib has made "gs:/bucket" of "gs://bucket".
    if url := re.fullmatch(r"([A-Za-z][\w+.-]+:)/+(.*)", str(path)):
        raise BadInput(
            f"{name} {url[1]}//{url[2]} is a bucket URL, not a local path: mount the bucket and pass its mount point, "
            "or pass a local path; a setting of your own must be declared as str, because pathlib changes URLs"
        )


def read_config(run_dir: Path) -> dict[str, Any] | None:
    """Returns the contents of a run's config.json; None without that file. Raises BadInput if it is damaged."""
    kinds: dict[str, type] = {"settings": dict, "versions": dict, "code_sha256": dict, "starts": list}
    kinds |= {"monitor_direction": str, "strategy": str, "replicas": int, "data": dict, "files": dict}
    config = read_json(run_dir / CONFIG, **kinds)
    if config is not None and not config["settings"]:
        raise BadInput(f"{run_dir / CONFIG} has no settings: restore it, or start a new run")
    return config
