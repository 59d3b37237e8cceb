"""Rejects answers that would make a broken project: one ERROR line per problem, all problems at once."""

import json
import keyword
import re
import sys
import unicodedata
from collections.abc import Iterator

LONGEST_SLUG = 40
# The files and folders of the project, its starters included, and those that its use creates.
OWN_FILES = {
    "train",
    "task",
    "config",
    "engine",
    "predict",
    "launch",
    "deploy",
    "docs",
    "tests",
    "test",
    "starters",
    "sweep",
}
OWN_FILES |= {"catalog", "data", "distance", "item_vectors", "prepare_data", "shapes", "speed", "towers", "transformer"}
MADE_BY_USE = {"runs", "build", "dist"}
# The packages that `pip install -e ".[dev,ray,sweep]"` installs or uses. pip would take a project of such a name for
# another version of the package, and reject it or replace the package. Names are written with _ here,
# which to pip is the same as -.
PACKAGES = """
absl_py alembic annotated_types anyio ast_serialize astunparse attrs certifi cfgv charset_normalizer click cloudpickle
colorlog contourpy cycler distlib docstring_parser filelock flatbuffers fonttools fsspec gast google_pasta grpcio h11
h5py hf_xet httpcore2 httpx2 huggingface_hub identify idna iniconfig joblib jsonschema jsonschema_specifications
kagglehub kagglesdk keras keras_hub kiwisolver libclang librt mako markdown markdown_it_py markupsafe matplotlib mdurl
ml_dtypes msgpack mypy mypy_extensions namex narwhals nodeenv numpy opt_einsum optree optuna packaging pandas pathspec
pillow pip platformdirs pluggy pre_commit protobuf pyarrow pydantic pydantic_core pygments pyparsing pytest
python_dateutil python_discovery pyyaml ray referencing regex requests rich rpds_py ruff scikit_learn scipy
sentencepiece setuptools six sklearn sqlalchemy tensorboard tensorboard_data_server tensorboardx tensorflow
tensorflow_text termcolor threadpoolctl tokenizers tqdm truststore typeguard typing_extensions typing_inspection tyro
tzdata urllib3 uv virtualenv werkzeug wheel wrapt
"""
WINDOWS_DEVICES = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10))}


def problems(answers: dict[str, str]) -> list[str]:
    """Returns one line, "<field> <value> <rule>", for each problem of the answers."""
    slug = answers["project_slug"]
    found = [f"project_slug {slug!r} {rule}" for rule in _broken_slug_rules(slug)]
    for field in ("project_name", "author_name"):
        found += [f"{field} {answers[field]!r} {rule}" for rule in _broken_name_rules(answers[field])]
    return found


def _broken_slug_rules(slug: str) -> Iterator[str]:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", slug):
        yield "must start with a lower-case letter and contain only lower-case letters, digits and underscores"
    elif slug.endswith("_"):
        yield "ends with an underscore (a package name must end with a letter or a digit): remove it"
    if len(slug) > LONGEST_SLUG:
        yield f"has {len(slug)} characters: use at most {LONGEST_SLUG}"
    if keyword.iskeyword(slug) or keyword.issoftkeyword(slug):
        yield "is a Python keyword: choose another name"
    elif slug in sys.stdlib_module_names:
        yield "is the name of a module of Python's standard library: choose another name"
    elif slug in OWN_FILES | MADE_BY_USE:
        yield "is the name of a file or folder of the project: choose another name"
    elif re.sub("_+", "_", slug) in PACKAGES.split():
        yield "is the name of a package that is installed with the project: choose another name"
    if slug.lower() in WINDOWS_DEVICES:
        yield "is the name of a device on Windows: choose another name"


def _broken_name_rules(name: str) -> Iterator[str]:
    if not name.strip():
        yield "is empty: enter a name"
    elif name != name.strip():
        yield "starts or ends with white space: remove it"
    if '"' in name or "\\" in name:
        yield 'contains " or a backslash (pyproject.toml would not be valid): remove it'
    if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in name):
        yield "contains a line break or another control character: remove it"


if __name__ == "__main__":
    # The answers arrive as JSON in a raw string: data, never code.
    rejected = problems(
        json.loads(
            r"""{
                "project_name": {{ cookiecutter.project_name | tojson }},
                "project_slug": {{ cookiecutter.project_slug | tojson }},
                "author_name": {{ cookiecutter.author_name | tojson }}
            }"""
        )
    )
    for problem in rejected:
        print(f"ERROR: {problem}", file=sys.stderr)
    sys.exit(1 if rejected else 0)
