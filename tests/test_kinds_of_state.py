"""What becomes of state, and of random numbers, that the hooks keep for themselves: see kinds_of_state.py."""

from pathlib import Path

import pytest

from rendering import Bake, run

PROGRAM = Path(__file__).parent / "helpers/kinds_of_state.py"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["kept", "drawn"])
def test_state_is_kept_and_what_is_not_repeated_is_reported(kind: str, default_bake: Bake, tmp_path: Path) -> None:
    whole = default_bake.run("python", PROGRAM, kind, tmp_path / "whole")
    stopped = run("python", PROGRAM, kind, tmp_path / "stopped", "6", folder=default_bake.folder)
    assert stopped.returncode == 42, stopped.stderr
    default_bake.run("python", PROGRAM, kind, tmp_path / "stopped")
    one, other = ({**default_bake.result(tmp_path / name), "seconds": 0, "goodput": 0} for name in ("whole", "stopped"))
    assert (one == other) == (kind == "kept")
    if kind == "drawn":
        reported = [line for line in (whole.stdout + whole.stderr).splitlines() if line.startswith("task.")]
        assert len(reported) == 3
        assert all("(kinds_of_state.py:" in line for line in reported)
