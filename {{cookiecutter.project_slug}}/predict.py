"""Predictions from the best weights of a run, on the devices of this machine.

    python predict.py runs/default digits.npy                     writes predictions.csv, or .npz if they need that
    python predict.py runs/default digits.npy --output digits.npz
    python predict.py --help

In a notebook:

    import predict

    predictor = predict.load("runs/default")
    predictor(examples)                       the outputs of task.predict_step, as arrays
    predictor.model, predictor.settings       the Keras model with the best weights; the run's settings
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from config import Config

import tyro

from engine.command_line import errors_in_one_line, settings_of_run
from engine.errors import BadInput, end_at_signals, exit_codes
from engine.settings import check_is_local

if TYPE_CHECKING:
    from engine.trained.predictions import Predictor

DEFAULT_OUTPUTS = (Path("predictions.csv"), Path("predictions.npz"))  # The second one takes outputs of any shape.

# TensorFlow takes seconds to import. So it is imported in the functions that need it, after the command line is read.


@dataclasses.dataclass(frozen=True)
class Options:
    """Writes a run's predictions for the examples in a file or folder, in order."""

    run_dir: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_DIR")]
    """Directory of the run."""
    input: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="INPUT")]
    """File or folder of examples, which task.read_inputs reads."""
    output: Path | None = None
    """A .csv file, with a row for each example, or an .npz file, with an array for each output. Default:
    predictions.csv, or predictions.npz if an output does not fit into a table."""
    batch_size: int = 128
    """Number of examples to prepare and predict at a time."""

    def __post_init__(self) -> None:
        """Raises BadInput for the first value that breaks its rule."""
        check_is_local("INPUT", self.input)
        if not os.access(self.input, os.R_OK):
            raise BadInput(f"INPUT {self.input} does not exist or cannot be read: pass a file or a folder of examples")
        for output in [self.output] if self.output else DEFAULT_OUTPUTS:
            self._check_output(output)
        if self.batch_size < 1:
            raise BadInput(f"--batch-size {self.batch_size} must be at least 1")

    def _check_output(self, output: Path) -> None:
        check_is_local("--output", output)
        if output.suffix not in (".csv", ".npz"):
            raise BadInput(f"--output {output} must end in .csv or .npz")
        if output.exists() and not output.is_file():  # A device would be replaced by a file.
            raise BadInput(f"--output {output} is not a regular file, or a link to one: pass another path")
        if not (folder := Path(os.path.realpath(output)).parent).is_dir():  # A link is followed.
            raise BadInput(f"--output {output} cannot be written: {folder} does not exist: create it first")
        if not os.access(folder, os.W_OK):
            raise BadInput(f"--output {output} cannot be written: {folder} is read-only: pass another folder")
        if _contains(self.input, output):
            raise BadInput(f"--output {output} is INPUT {self.input}, or a file in it: pass another path")
        if output.exists() and _contains(self.run_dir, output):
            raise BadInput(
                f"--output {output} is a file in {self.run_dir}, and no file of a run is overwritten: remove it, or "
                "pass another path"
            )


def _contains(outer: Path, path: Path) -> bool:
    """Returns whether `path`, its links followed, is the file or folder `outer`, or in that folder."""
    path = Path(os.path.realpath(path))
    return outer.exists() and any(part.exists() and part.samefile(outer) for part in (path, *path.parents))


def load(run_dir: str | Path) -> "Predictor":
    """Returns a function that predicts examples with a run's best weights; it needs none of the run's data.

    It sets task.config and task.model, clears Keras's session, seeds the random numbers, and sets Keras's dtype policy
    to the run's --precision. Raises BadInput if there is no run, or the hooks of task.py do not fit it.
    """
    settings = settings_of_run(Config, Path(run_dir))
    import task
    from engine.cluster.strategy import let_gpu_memory_grow
    from engine.run.directory import Directory
    from engine.trained.loading import load_trained
    from engine.trained.predictions import Predictor

    let_gpu_memory_grow()
    Directory(settings).check_same_run()
    return Predictor(load_trained(task, settings))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program; `arguments` replaces the command line. Exit codes: see engine/errors.py."""
    with exit_codes():
        with errors_in_one_line():
            options = tyro.cli(Options, args=arguments)
        settings_of_run(Config, options.run_dir)

        from engine.errors import user_errors_named
        from engine.trained.predictions import write_predictions

        source = f"INPUT {options.input}"
        with user_errors_named(lambda: source):
            import task

            if not hasattr(task, "read_inputs"):
                raise BadInput("task.py has no function read_inputs(path): add one that yields names and features")
            predictor = load(options.run_dir)
            output = predictor.choose_output(*[options.output] if options.output else DEFAULT_OUTPUTS)
            names, predictions = predictor.predict(task.read_inputs(options.input), options.batch_size, source)
            write_predictions(output, names, predictions)


if __name__ == "__main__":
    end_at_signals()
    main()
