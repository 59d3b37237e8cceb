"""Every setting of a run, with its default. The command line of train.py is made from this class."""

import argparse
import contextlib
import dataclasses
import io
import json
import math
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tyro

from engine.errors import BadInput
from engine.run.directory import recorded_settings

LARGEST = 2**31 - 1  # Of the whole numbers that become tensors of 32 bits.


@dataclasses.dataclass(frozen=True)
class Config:
    """Trains task.py with a custom loop: the same numbers on one device and on many.

    A run directory that holds a checkpoint is resumed; a finished run, started again, says so.
    """

    # TODO(you): Add the settings of your task; each becomes a flag and is recorded with the run.

    run_dir: Path = Path("runs/default")
    """Where everything the run writes goes."""
    fresh: bool = False
    """Move the run in --run-dir aside (runs/default.1) and start anew."""

    check: bool = False
    """Examine the task on a few batches, tell what to mend, and train nothing."""
    evaluate_only: bool = False
    """Print the validation and test metrics of the run's best weights, with its settings, or of --init-from; train and
    write nothing."""
    evaluate_continuously: bool = False
    """Beside a run in --run-dir, validate each of its checkpoints as it appears, with its settings, until it ends."""
    evaluation_timeout: float = 3600.0
    """Seconds without a new checkpoint after which --evaluate-continuously ends."""

    init_from: Path | None = None
    """Begin a new run with the weights of another run, a .weights.h5 or .keras file, or a tf.train.Checkpoint."""
    init_partial: bool = False
    """Let --init-from give only the weights that it and the model, or one layer of it, have in common."""

    epochs: int = 30
    """Passes over the examples. More of them continue a finished run; a schedule is then stretched to all."""
    global_batch_size: int = 32
    """Examples per step over all replicas together; the number of replicas has to divide it."""
    learning_rate: float = 3e-3
    """Peak learning rate of the optimizer. A resume with another one goes on with that, and records it."""
    seed: int = 0
    """Fixes initial weights, the order of examples, and augmentation."""

    strategy: Literal["auto", "one_device", "mirrored", "multi_worker", "tpu", "parameter_server"] = "auto"
    """mirrored: each GPU, or simulated device, has a copy of the model. multi_worker: those of several processes have.
    auto: multi_worker where TF_CONFIG, Slurm or Kubernetes describes a cluster, else one_device or mirrored.
    tpu: not measured. parameter_server: asynchronous, so without the promise of equal numbers, and unsupported with
    Keras 3 by its authors."""
    cluster_timeout: float = 300.0
    """Seconds to wait for the other processes of a cluster at the start."""
    deterministic: bool = False
    """Replace operations that round as the timing falls, some on GPUs (not measured), by slower ones that do not, and
    turn off TF32, with which newer GPUs multiply float32 by fewer digits. Runs on the CPU are bit-equal without it,
    with every model that was tried."""
    simulated_devices: int = 0
    """Train on N logical CPU devices in place of real ones, to try distribution on any machine. 0: real devices."""
    all_reduce: Literal["auto", "nccl", "hierarchical_copy", "one_device"] = "auto"
    """How the gradients of a machine's GPUs are summed. auto: by NCCL; if that hangs, try the others (not measured)."""
    steps_per_execution: Literal["auto"] | int = "auto"
    """Steps run in the graph per return to Python. auto: about a second's worth. Changes no number."""

    precision: Literal["float32", "mixed_bfloat16", "mixed_float16"] = "float32"
    """Arithmetic of the layers; variables stay float32. mixed_float16 scales the loss, alike on all replicas."""
    jit: bool = False
    """Compile forward and backward pass with XLA."""
    profile: bool = False
    """Write a profile of some training steps for TensorBoard, after the first ones."""
    micro_batches: int = 1
    """Parts that a replica's share of a batch is computed in, one after the other, for one update: less memory."""
    clip_norm: float | None = None
    """Limit to the global norm of the gradients, after their sum over the replicas."""
    ema_decay: float | None = None
    """Validate, test and keep a moving average of the weights: average <- decay * average + (1 - decay) * weights."""

    keep_last_batch: bool = False
    """Train on the short last batch of an epoch too, padded with examples of weight 0; else it is left out."""
    shuffle_buffer_size: int = 100_000
    """Examples held in memory to shuffle among, before they are decoded. A smaller split is shuffled completely."""

    monitor: str = "validation/loss"
    """The metric that decides which weights are the best: those are tested after the last epoch."""
    monitor_direction: Literal["auto", "min", "max"] = "auto"
    """Whether lower or higher is better. auto: by the metric's name."""
    patience: int | None = None
    """Stop after that many epochs without a better --monitor."""
    validate_every_steps: int | None = None
    """Validate at every multiple of that many steps too, besides at the end of each epoch."""

    checkpoint_every_steps: int | None = None
    """Save at every multiple of that many steps too, besides at the end of each epoch."""
    keep_checkpoints: int = 3
    """Number of newest checkpoints to keep. The best weights are kept beside them."""
    async_checkpoints: bool = False
    """Write checkpoints in a thread of its own, while training goes on; takes memory for one more copy of the state."""

    def __post_init__(self) -> None:
        """Raises BadInput for the first value that breaks its rule."""
        for name in ("epochs", "global_batch_size", "micro_batches", "shuffle_buffer_size", "keep_checkpoints"):
            self._require(name, getattr(self, name) >= 1, "must be 1 or more")
            self._require(name, getattr(self, name) <= LARGEST, f"must be at most {LARGEST}")
        for name in ("patience", "checkpoint_every_steps", "validate_every_steps"):
            value = getattr(self, name)
            self._require(name, value is None or value >= 1, "must be 1 or more")
        self._require("fresh", not (self.fresh and self.evaluate_only), "leaves nothing for --evaluate-only")
        self._require(
            "evaluate_continuously", not (self.evaluate_continuously and self.fresh), "needs a run, not --fresh"
        )
        self._require("init_partial", not self.init_partial or self.init_from is not None, "needs --init-from")
        if self.steps_per_execution != "auto":
            self._require("steps_per_execution", self.steps_per_execution >= 1, "must be auto, or 1 or more")
            self._require("steps_per_execution", self.steps_per_execution <= LARGEST, f"must be at most {LARGEST}")
        self._require("simulated_devices", self.simulated_devices >= 0, "must be 0 (real devices) or more")
        self._require("simulated_devices", self.simulated_devices <= 1024, "must be at most 1024")
        self._require("seed", 0 <= self.seed <= LARGEST, f"must be from 0 to {LARGEST}")
        for name in ("learning_rate", "clip_norm", "cluster_timeout", "evaluation_timeout"):
            value = getattr(self, name)
            holds = value is None or (math.isfinite(value) and value > 0)
            self._require(name, holds, "must be a finite number above 0")
        self._require("cluster_timeout", self.cluster_timeout <= 1e9, "must be at most 1e9")  # Timers end there.
        self._require("ema_decay", self.ema_decay is None or 0 < self.ema_decay < 1, "must be between 0 and 1")
        for each in dataclasses.fields(self):  # Yours too.
            value = getattr(self, each.name)
            if isinstance(value, int):
                self._require(each.name, -(2**63) <= value < 2**63, "must fit into 64 bits")
            elif isinstance(value, float):
                self._require(each.name, not math.isnan(value), "must be a number")  # No run would equal itself.
            elif isinstance(value, str | Path):
                self._require(each.name, _is_utf8(str(value)), "must be text in UTF-8")

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            value = getattr(self, name)
            raise BadInput(f"{flag(name)} {rule}" if value is True else f"{flag(name)} {value} {rule}")

    def as_json(self) -> dict[str, bool | int | float | str]:
        """Returns the settings as config.json holds them; what JSON has no form for becomes text."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))


# These may differ when a run is resumed; any other setting would make it another run.
MAY_CHANGE_ON_RESUME = frozenset(
    {
        "run_dir",
        "fresh",
        "check",
        "evaluate_only",
        "evaluate_continuously",
        "evaluation_timeout",
        "epochs",
        "strategy",
        "all_reduce",
        "cluster_timeout",
        "simulated_devices",
        "steps_per_execution",
        "patience",
        "checkpoint_every_steps",
        "keep_checkpoints",
        "async_checkpoints",
        "profile",
        "learning_rate",
    }
)
# --evaluate-only and --evaluate-continuously take every other setting from the run, and of those above these.
EVALUATED_WITH = frozenset({"epochs", "learning_rate"})
# How a run began says nothing about what it is now.
NOT_OF_EVALUATION = frozenset({"init_from", "init_partial"})


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # TensorFlow and JSON take no other names of files.
        return False
    return True


def flag(name: str) -> str:
    """Returns the command-line spelling of a setting: "run_dir" -> "--run-dir"."""
    return "--" + name.replace("_", "-")


def read_settings(arguments: Sequence[str] | None = None) -> Config:
    """Returns the settings that the command line gives. Raises BadInput, in one line, for anything it does not know.

    To evaluate a run, what the command line leaves out is as the run has it.

    Args:
        arguments: what follows the program's name; None reads the process's own.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    run = _run_to_evaluate(given)
    # With a run's settings as defaults, a switch that is on there can be given as well as taken back.
    how = {"default": run} if run else {"config": (tyro.conf.FlagCreatePairsOff,)}
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            return tyro.cli(Config, args=given, **how)
    except SystemExit as ended:
        if not ended.code:
            raise  # --help was printed.
        # tyro draws a box, in Unicode or ASCII: a title, then paragraphs between rules, last where the help is.
        text = re.sub(r"[╭╮╰╯│\s]+", " ", messages.getvalue())
        if missing := re.findall(r"(--[\w-]+) [^()]*\(required\)", text):
            raise BadInput(f"{', '.join(missing)} has no default: give it; see: python train.py --help") from None
        paragraphs = [paragraph.strip(" .") for paragraph in re.split(r"[─-]{10,}", text)]
        told = [paragraph for paragraph in paragraphs[1:] if paragraph and not paragraph.startswith("For full")]
        reason = told[0] if told else text.strip()
        suggested = re.search(r"Perhaps you meant: (--[a-z-]+)", text)
        hint = f"did you mean {suggested[1]}?" if suggested else "see: python train.py --help"
        raise BadInput(f"{reason}; {hint}") from None


def _run_to_evaluate(given: list[str]) -> Config | None:
    """Returns the settings with which the run was trained that the command line wants evaluated, if there is one."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("evaluate_only", "evaluate_continuously"):
        parser.add_argument(flag(name), f"--{name}", dest="evaluate", action="store_true")
    for name, default in (("run_dir", Config.run_dir), ("init_from", None)):
        parser.add_argument(flag(name), f"--{name}", type=Path, default=default)
    try:
        asked, _ = parser.parse_known_args(given)
    except argparse.ArgumentError:
        return None  # tyro says what is wrong.
    if not asked.evaluate or asked.init_from or not _is_utf8(str(asked.run_dir)):
        return None
    recorded = recorded_settings(asked.run_dir) or {}
    left_to_this_program = (MAY_CHANGE_ON_RESUME - EVALUATED_WITH) | NOT_OF_EVALUATION
    try:
        return _from_json(Config, {name: recorded[name] for name in recorded.keys() - left_to_this_program})
    except TypeError:  # A setting has no default, and the run has not recorded it.
        return None


def _from_json(kind: Any, recorded: Mapping[str, Any]) -> Any:
    """Returns a dataclass of what `as_json` made of it; fields whose values cannot be read back keep their defaults."""
    values = {}
    for each in dataclasses.fields(kind):
        hint = typing.get_type_hints(kind)[each.name]
        value = recorded.get(each.name, each.default)
        if each.name not in recorded or value == each.default:
            continue
        if dataclasses.is_dataclass(hint) and isinstance(value, dict):
            values[each.name] = _from_json(hint, value)
            continue
        with contextlib.suppress(SystemExit):  # Read as the command line would be.
            values[each.name] = tyro.cli(hint, args=_texts(value), console_outputs=False)
    return kind(**values)


def _texts(value: Any) -> list[str]:
    """Returns a JSON value as it is written on a command line."""
    if isinstance(value, dict):
        value = [part for pair in value.items() for part in pair]
    return [text for part in value for text in _texts(part)] if isinstance(value, list) else [str(value)]
