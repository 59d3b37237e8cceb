"""The fixture that checks the hooks of a test."""

from collections.abc import Callable
from typing import Any

import pytest
from planted import few_examples, linear_model

import task
import train
from config import Config
from engine.check.command import PARTS, check_task

Check = Callable[..., tuple[bool, list[str]]]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Check:
    """Checks the shipped task with some hooks replaced and a small model; returns whether all pass, and the lines."""

    def run(
        hooks: dict[str, Any] | None = None, only: tuple[str, ...] = PARTS, **settings: Any
    ) -> tuple[bool, list[str]]:
        # The steps of each split are traced several times, and those of a test are those of a validation.
        splits = ("train", "validation") if "evaluation" in only else ("train",)
        small = {
            "load_examples": lambda split: few_examples(split) if split in splits else None,
            "create_model": linear_model,
        }
        for name, hook in {**small, **(hooks or {})}.items():
            monkeypatch.setattr(train if name == "compile_steps" else task, name, hook)
        capsys.readouterr()
        passed = check_task(train, task, Config(**{"monitor": "train/loss", **settings}), only)
        lines = capsys.readouterr().out.splitlines()
        return passed, [line for line in lines if line.startswith(("ok ", "FAIL", "not compared "))]

    return run
