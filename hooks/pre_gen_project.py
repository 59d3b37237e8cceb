"""Refuses answers that would make a broken project: one ERROR line per problem, all problems at once."""

import json
import keyword
import re
import sys
import unicodedata
from collections.abc import Iterator

LONGEST_SLUG = 40
# What the generated project is made of, and what is made in it later.
OWN_FILES = {"train", "task", "config", "engine", "predict", "launch", "deploy", "docs", "tests", "test", "starters"}
OWN_FILES |= {"data", "distance", "prepare_data", "shapes"}  # Of a starter.
MADE_BY_USE = {"runs", "build", "dist"}
# What `pip install -e ".[dev]"` of the project installs, and does it with: to pip the project would be another version
# of that package, which it refuses, or puts in its place. With _ for -; a dash and an underscore are one to pip.
PACKAGES = """
absl_py anyio ast_serialize astunparse certifi cfgv charset_normalizer cloudpickle contourpy cycler distlib
docstring_parser filelock flatbuffers fonttools fsspec gast google_pasta grpcio h11 h5py hf_xet httpcore2 httpx2
huggingface_hub identify idna iniconfig joblib kagglehub kagglesdk keras keras_hub kiwisolver libclang librt markdown
markdown_it_py markupsafe matplotlib mdurl ml_dtypes mypy mypy_extensions namex narwhals nodeenv numpy opt_einsum optree
packaging pathspec pillow pip platformdirs pluggy pre_commit protobuf pygments pyparsing pytest python_dateutil
python_discovery pyyaml regex requests rich ruff scikit_learn scipy sentencepiece setuptools six sklearn tensorboard
tensorboard_data_server tensorflow tensorflow_text termcolor threadpoolctl tokenizers tqdm truststore typeguard
typing_extensions tyro tzdata urllib3 uv virtualenv werkzeug wheel wrapt
"""
WINDOWS_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10))}


def problems(answers: dict[str, str]) -> list[str]:
    """Returns one line, "<field> <value> <rule>", for everything that is wrong with the answers."""
    slug = answers["project_slug"]
    found = [f"project_slug {slug!r} {rule}" for rule in _broken_slug_rules(slug)]
    for field in ("project_name", "author_name"):
        found += [f"{field} {answers[field]!r} {rule}" for rule in _broken_name_rules(answers[field])]
    return found


def _broken_slug_rules(slug: str) -> Iterator[str]:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", slug):
        yield "has to begin with a lower-case letter and go on with lower-case letters, digits and underscores only"
    elif slug.endswith("_"):
        yield "ends with an underscore: leave it out, a name in pyproject.toml ends with a letter or digit (PEP 508)"
    if len(slug) > LONGEST_SLUG:
        yield f"is {len(slug)} characters long: {LONGEST_SLUG} are allowed"
    if keyword.iskeyword(slug) or keyword.issoftkeyword(slug):
        yield "is a Python keyword: choose another name"
    elif slug in sys.stdlib_module_names:
        yield "is the name of a module of Python's standard library: choose another name"
    elif slug in OWN_FILES | MADE_BY_USE:
        yield "is a name that the generated project keeps for itself: choose another name"
    elif re.sub("_+", "_", slug) in PACKAGES.split():
        yield "is the name of a package that is installed with the project: choose another name"
    if slug.lower() in WINDOWS_DEVICES:
        yield "is the name of a device on Windows: choose another name"


def _broken_name_rules(name: str) -> Iterator[str]:
    if not name.strip():
        yield "is empty: give a name"
    elif name != name.strip():
        yield "begins or ends with white space: remove it"
    if '"' in name or "\\" in name:
        yield 'holds " or a backslash: leave them out, they end the text in pyproject.toml'
    if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in name):
        yield "holds a line break or another control character: leave it out"


if __name__ == "__main__":
    # The answers arrive as JSON in a raw string: data, never code.
    refused = problems(
        json.loads(
            r"""{
                "project_name": {{ cookiecutter.project_name | tojson }},
                "project_slug": {{ cookiecutter.project_slug | tojson }},
                "author_name": {{ cookiecutter.author_name | tojson }}
            }"""
        )
    )
    for problem in refused:
        print(f"ERROR: {problem}", file=sys.stderr)
    sys.exit(1 if refused else 0)
