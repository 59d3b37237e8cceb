"""Prints the section of CHANGELOG.md for a tag such as v0.1.0; exits 1 if the tag is not the version of the files."""

import json
import re
import sys
import tomllib
from pathlib import Path

TEMPLATE = Path(__file__).parents[1]


def versions() -> dict[str, str]:
    """Returns the version that each file names."""
    template, project = (
        tomllib.loads((TEMPLATE / folder / "pyproject.toml").read_text(encoding="utf-8"))
        for folder in (".", "{{cookiecutter.project_slug}}")
    )
    return {
        "pyproject.toml": template["project"]["version"],
        "cookiecutter.json": json.loads((TEMPLATE / "cookiecutter.json").read_text(encoding="utf-8"))["_version"],
        "the project's pyproject.toml": project["tool"]["tf-dist-template"]["version"],
    }


def notes(tag: str) -> str:
    """Returns the section of CHANGELOG.md. Raises SystemExit if the tag, the versions and the headings disagree."""
    for file, version in versions().items():
        if tag != f"v{version}":
            sys.exit(f"The tag is {tag}, but {file} says {version}.")
    changelog = (TEMPLATE / "CHANGELOG.md").read_text(encoding="utf-8")
    section = re.search(rf"(?ms)^## {re.escape(tag[1:])}\n(.*?)(?=^## |\Z)", changelog)
    if not section:
        sys.exit(f'CHANGELOG.md has no section "## {tag[1:]}".')
    return section[1].strip()


if __name__ == "__main__":
    print(notes(sys.argv[1]))
