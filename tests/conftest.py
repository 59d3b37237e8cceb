"""Rendered projects, for every test that wants one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rendering import Bake, cookiecutter


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
