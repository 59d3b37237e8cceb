"""Rendered projects, for every test that wants one; and the order of the tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rendering import Bake, cookiecutter

# These take half a minute each. They begin first, so that no process is left alone with one at the end.
LONGEST = (
    "test_unrendered_project_passes_its_own_tests",
    "test_killed_run_ends_bit_equal",
    "test_full_disk_is_one_line_and_the_run_goes_on_with_more_room",
    "test_stopped_run_computes_no_step_twice",
)


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    items.sort(key=lambda item: item.originalname not in LONGEST)


@pytest.fixture
def bake(tmp_path: Path) -> Callable[..., Bake]:
    """Renders the template with some answers given."""

    def render(**answers: str) -> Bake:
        output = tmp_path / "rendered"
        done = cookiecutter(output, **answers)
        assert done.returncode == 0, done.stderr
        (folder,) = output.iterdir()
        return Bake(folder)

    return render


@pytest.fixture(scope="session")
def default_bake(tmp_path_factory: pytest.TempPathFactory) -> Bake:
    """The project of the default answers; shared, so tests leave its files as they are."""
    output = tmp_path_factory.mktemp("default") / "rendered"
    done = cookiecutter(output)
    assert done.returncode == 0, done.stderr
    (folder,) = output.iterdir()
    return Bake(folder)
