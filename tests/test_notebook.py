"""docs/colab.ipynb runs from its first cell to its last."""

import re
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

from rendering import TEMPLATE

NOTEBOOK = TEMPLATE / "docs" / "colab.ipynb"


@pytest.mark.long
def test_notebook_runs_and_finds_the_planted_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    monkeypatch.setenv("TF_DIST_TEMPLATE", str(TEMPLATE))
    monkeypatch.chdir(tmp_path)
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.create_kernel_manager()
    client.km.kernel_cmd = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    client.execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []) if "text" in output
    )
    assert "mirrored 4 replica(s) 4 simulated on" in printed
    assert printed.count("checks failed") == 1
    assert re.search(r"All \d+ checks passed\.", printed)


def test_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
