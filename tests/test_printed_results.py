"""The lines of a run that the pages show are those of a run."""

import re
from collections.abc import Callable

import pytest

from pages import PAGES
from rendering import Bake

# Without the seconds and the speed, which differ between machines.
EPOCH = re.compile(r"^epoch +(\d+)/5  loss +(\S+) / +(\S+)  accuracy +(\S+) / +(\S+)  ", re.MULTILINE)


@pytest.mark.long
def test_epochs_in_the_pages_are_those_of_a_run(bake: Callable[..., Bake]) -> None:
    pages = {page: EPOCH.findall(page.read_text(encoding="utf-8")) for page in PAGES}
    shown = {page: lines for page, lines in pages.items() if lines}
    assert shown
    project = bake()
    for devices in ([], ["--simulated-devices", "2", "--run-dir", "runs/two"]):
        printed = EPOCH.findall(project.run("python", "train.py", "--epochs", "5", *devices).stdout)
        for page, lines in shown.items():
            for line in lines:
                epoch, *values = map(float, line)
                # Other processors round differently, so the last digit may differ.
                assert values == pytest.approx(list(map(float, printed[int(epoch) - 1]))[1:], rel=1e-3), page
