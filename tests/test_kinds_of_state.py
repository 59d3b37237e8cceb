"""What becomes of state and of randomness that the hooks keep for themselves: the kinds of kinds_of_state.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# A resumed run has the bits of one that was left alone.
REPEATED = (
    "variable_made_in_create_model",
    "random_generator_of_a_layer",
    "optimizer_with_variables_of_its_own",
    "text_variable_of_a_layer",
    "metric_with_an_empty_variable",
    "numpy_with_the_seed_in_prepare_example",
)
# It has not, and a run says so, with the place.
REPORTED = ("tf_nn_dropout_in_a_layer", "numpy_in_prepare_example", "tf_random_with_a_seed_in_prepare_example")


@pytest.mark.long
def test_state_is_kept_and_what_is_not_repeated_is_reported() -> None:
    folder = Path(__file__).parent / "helpers"
    command = [sys.executable, "kinds_of_state.py", *REPEATED, *REPORTED]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=900)
    found = {line["kind"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert found.keys() == {*REPEATED, *REPORTED}
    for kind, line in found.items():
        assert line["training"] == 0, line
        assert line["same bits"] == (kind in REPEATED), line
    for kind in REPORTED:
        assert "(kinds_of_state.py:" in found[kind]["lines"][0]
