"""Writes the vectors of all items, for an index of nearest neighbours.

    python item_vectors.py runs/default item_vectors.npz

The .npz file has `item_ids` (texts, [items]) and `vectors` (float32, [items, vector_length]). The score of an item is
the product of its vector and the user's, which predict.py and the SavedModel return as `user_vector`.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from config import Config

import tyro

from engine.command_line import errors_in_one_line, settings_of_run
from engine.errors import BadInput, end_at_signals, exit_codes


@dataclasses.dataclass(frozen=True)
class Options:
    """Writes the vectors of all items, by the best weights of a run."""

    run_dir: tyro.conf.Positional[Path]
    """Directory of the run."""
    output: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUTPUT")]
    """The .npz file to write. One that exists is replaced."""

    def __post_init__(self) -> None:
        if self.output.suffix != ".npz":
            raise BadInput(f"OUTPUT {self.output} must end in .npz: pass such as item_vectors.npz")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the program; `arguments` replaces the command line."""
    with exit_codes():
        with errors_in_one_line():
            options = tyro.cli(Options, args=arguments)
        settings_of_run(Config, options.run_dir)
        # TensorFlow takes seconds to import, so it is imported after the command line is read.
        import numpy as np

        import predict
        import task
        from engine.files import write_atomically

        predict.load(options.run_dir)
        item_ids = [each.decode() for each in task.catalog().item_ids.numpy()[1:]]
        firsts = range(1, len(item_ids) + 1, task.config.items_at_once)
        vectors = np.concatenate(
            [task.item_vectors(task.item_block(first), training=False).numpy() for first in firsts]
        )

        def write(path: Path) -> None:
            with path.open("wb") as file:  # np.savez would append .npz to a path.
                np.savez(file, item_ids=np.array(item_ids), vectors=vectors)

        write_atomically(options.output, write, "run the same command again, or pass another OUTPUT")
        print(f"{len(item_ids):,} vectors of {vectors.shape[1]} numbers in {options.output}")


if __name__ == "__main__":
    end_at_signals()
    main()
