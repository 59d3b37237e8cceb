"""The site of the pages: its navigation and links, and that nothing in it leads nowhere or comes from another host.

The workflow "pages" builds it, which needs the network.
"""

import importlib.util
import json
import tomllib
from pathlib import Path

import pytest

from rendering import PROJECT, STARTERS, TEMPLATE

_spec = importlib.util.spec_from_file_location("make_site", TEMPLATE / "docs/make_site.py")
make_site = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_site)

PAGES = make_site.pages_of(TEMPLATE)
ON_GITHUB = f"{make_site.REPOSITORY}/blob/main"
IN_PROJECT = make_site.PROJECT
# The file, a link in it, and what it becomes; None if it leads nowhere.
LINKS = [
    ("README.md", "docs/pitfalls.md#clusters", "template/pitfalls.md#clusters"),
    ("README.md", "docs/curves.png", "assets/curves.png"),
    ("README.md", "docs", f"{make_site.REPOSITORY}/tree/main/docs"),
    (f"{IN_PROJECT}/README.md", "docs/starter.md", "starters/image_classification.md"),
    (f"{IN_PROJECT}/docs/data.md", f"{ON_GITHUB}/docs/pitfalls.md", "../template/pitfalls.md"),
    (f"{IN_PROJECT}/docs/data.md", "../task.py", f"{ON_GITHUB}/%7B%7Bcookiecutter.project_slug%7D%7D/task.py"),
    (f"{IN_PROJECT}/docs/data.md", "#records", "#records"),
    (f"{IN_PROJECT}/docs/data.md", "https://www.tensorflow.org/guide", "https://www.tensorflow.org/guide"),
    (f"{IN_PROJECT}/starters/gan/docs/starter.md", "data.md", "../data.md"),
    ("README.md", "docs/none.png", None),
    ("README.md", f"{ON_GITHUB}/docs/none.md", None),
]


def test_links_lead_to_pages_of_the_site_or_the_repository_and_broken_ones_are_named() -> None:
    text = "See [the `page`]({0}), or\n`[no](link.md)`.\n\n```\n[no](link.md)\n```\n"
    for file, link, expected in LINKS:
        made, _, broken = make_site.with_links_of_site(text.format(link), file, PAGES, TEMPLATE)
        if expected:
            assert (made, broken) == (text.format(expected), [])
        else:
            assert broken == [f"{file}: {link} leads nowhere"]


def test_sources_have_every_page_and_no_broken_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_site, "fetch_mermaid", lambda _: False)  # It is on another host.
    titles = make_site.assemble(TEMPLATE, tmp_path / "source")
    assert set(titles) == {page.relative_to(tmp_path / "source").as_posix() for page in tmp_path.rglob("*.md")}
    files = [*TEMPLATE.glob("*.md"), *TEMPLATE.glob("docs/*.md"), *PROJECT.glob("docs/*.md"), PROJECT / "README.md"]
    assert len(titles) == len(files) + len(STARTERS) - 1 > 15
    assert "# My Training" in (tmp_path / "source/project/index.md").read_text(encoding="utf-8")

    make_site.write_settings(titles, tmp_path / "zensical.toml")
    settings = tomllib.loads((tmp_path / "zensical.toml").read_text(encoding="utf-8"))
    start, project, template = settings["project"]["nav"]
    assert start == {"Start": "index.md"}
    text = json.dumps([project, template])
    assert [page for page in titles if page != "index.md" and f'"{page}"' not in text] == []


def test_faults_of_a_built_site_are_found(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    good = '<a href="a/#there">1</a><a href="#here" id="here">2</a><a href="https://other.org/x">3</a>'
    (tmp_path / "index.html").write_text(f'{good}<a href="a/none.html">4</a><a href="a/index.html#none">5</a>')
    loads = '<script src="https://other.org/x.js"></script><img src="none.png"><p id="there">'
    fonts = '<link rel="stylesheet" href="//other.org/font.css"><link rel="canonical" href="https://other.org/">'
    (tmp_path / "a/index.html").write_text(loads + fonts)
    (tmp_path / "style.css").write_text('@font-face { src: url("https://other.org/font.woff2") } a { b: url(c.png) }')
    assert sorted(make_site.faults(tmp_path)) == [
        "a/index.html: //other.org/font.css is fetched from another host",
        "a/index.html: https://other.org/x.js is fetched from another host",
        "a/index.html: none.png leads nowhere",
        "index.html: a/index.html#none has no such anchor",
        "index.html: a/none.html leads nowhere",
        "style.css: https://other.org/font.woff2 is fetched from another host",
    ]
