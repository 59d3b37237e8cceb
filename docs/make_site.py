"""Makes one searchable site of the template's pages and of a rendered project's, in build/docs/site: make docs."""

import base64
import hashlib
import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from urllib.parse import quote, unquote, urlsplit

TEMPLATE = Path(__file__).parents[1]
PROJECT = "{{cookiecutter.project_slug}}"
REPOSITORY = "https://github.com/org/tf-dist-template"
ADDRESS = "https://org.github.io/tf-dist-template/"
# The order in the navigation. Pages that are not named here follow.
IN_PROJECT = (
    "jobs from_keras_fit data changing_data training reproducibility inference clusters recipes losses gradients "
    "tables series detection calls settings troubleshooting updating"
)
IN_TEMPLATE = "guarantees failures pitfalls porting design speed scale CONTRIBUTING"
# Draws the diagrams. The theme would fetch it from another host whenever a page with a diagram is opened.
MERMAID, MERMAID_FILE = "@mermaid-js/tiny@12.0.0", "package/dist/mermaid.tiny.js"
MERMAID_SHA512 = "ZW9YXy+3tSLPscBT+NnQO0K0qYH7BGES5nExl6Snoygey7xd2N0cO7Nq30N5k/u7gIeYoCrldyVy+VTCMWrNDQ=="
DIAGRAM = "```mermaid\n"

Pages = dict[str, str]  # The path of a file in the repository -> its page among the site's sources.


class Faults(Exception):
    """The pages cannot be made into a site. The text has a line for each fault."""


def main() -> None:
    """Makes the site; ends with the faults if there are any."""
    output = TEMPLATE / "build/docs"
    for name in ("source", "site"):
        shutil.rmtree(output / name, ignore_errors=True)
    try:
        titles = assemble(TEMPLATE, output / "source")
        write_settings(titles, output / "zensical.toml")
        command = (sys.executable, "-m", "zensical", "build", "--clean", "--strict", "--config-file", "zensical.toml")
        built = subprocess.run(command, cwd=output, capture_output=True, text=True, check=False)
        if built.returncode:
            printed, _, _ = (built.stdout + built.stderr).partition("Traceback")
            raise Faults(re.sub(r"\x1b\[[\d;]*m", "", printed).strip())
        if found := list(faults(output / "site")):
            raise Faults("\n".join(found))
    except Faults as problem:
        sys.exit(f"{problem}\nERROR: build/docs/site is not complete: fix the pages")
    print(f"{len(titles)} pages: python3 -m http.server --directory build/docs/site")


# --- Which pages there are --------------------------------------------------------------------------------------------


def pages_of(template: Path) -> Pages:
    """Returns every page, in the order of the navigation."""
    pages = {"README.md": "index.md", f"{PROJECT}/README.md": "project/index.md"}
    pages[f"{PROJECT}/docs/starter.md"] = "project/starters/image_classification.md"  # The others overlay its page.
    for path in sorted((template / PROJECT / "starters").glob("*/docs/starter.md")):
        pages[path.relative_to(template).as_posix()] = f"project/starters/{path.parts[-3]}.md"
    for folder, order, part in ((f"{PROJECT}/docs", IN_PROJECT, "project"), ("docs", IN_TEMPLATE, "template")):
        there = {path.stem for path in (template / folder).glob("*.md")} - {"starter"}
        ordered = [name for name in order.split() if name in there]
        for name in [*ordered, *sorted(there.difference(ordered))]:
            pages[f"{folder}/{name}.md"] = f"{part}/{name}.md"
    for path in sorted(template.glob("*.md")):
        pages.setdefault(path.name, f"template/{path.name}")
    return pages


def navigation(titles: dict[str, str]) -> list[dict[str, object]]:
    """Returns the navigation as Zensical takes it; `titles` are those of the pages."""

    def inside(folder: str) -> list[dict[str, object]]:
        return [{title: page} for page, title in titles.items() if str(PurePosixPath(page).parent) == folder]

    readme, *project = inside("project")
    (page,) = readme.values()
    in_project = [{"README": page}, project[0], {"Starters": inside("project/starters")}, *project[1:]]
    return [{"Start": "index.md"}, {"Your project": in_project}, {"The template": inside("template")}]


def write_settings(titles: dict[str, str], path: Path) -> None:
    """Writes Zensical's settings, which are those of docs/site and what follows from the pages."""
    # JSON's strings are TOML's; of tables, TOML separates names from values otherwise.
    nav = re.sub(r'(?<=[{])("(?:[^"\\]|\\.)*"): ', r"\1 = ", json.dumps(navigation(titles)))
    head = f'[project]\nsite_url = "{ADDRESS}"\nnav = {nav}\n'
    text = (TEMPLATE / "docs/site/zensical.toml").read_text(encoding="utf-8")
    path.write_text(text.replace("[project]\n", head, 1), encoding="utf-8")


# --- From the repository's files to the site's sources ----------------------------------------------------------------


def assemble(template: Path, source: Path) -> dict[str, str]:
    """Writes the sources of the site; returns each page's short title. Raises Faults for links that lead nowhere."""
    pages, titles, broken = pages_of(template), {}, []
    (source / "assets").mkdir(parents=True)
    shutil.copy(template / "docs/site/extra.css", source / "assets")
    draws = None
    for file, page in pages.items():
        text = rendered_readme(template) if file == f"{PROJECT}/README.md" else (template / file).read_text("utf-8")
        text, pictures, dead = with_links_of_site(text, file, pages, template)
        for picture in pictures:
            shutil.copy(template / picture, source / "assets")
        broken += dead
        if DIAGRAM in text:
            draws = fetch_mermaid(source / "assets/mermaid.js") if draws is None else draws
            script = os.path.relpath("assets/mermaid.js", PurePosixPath(page).parent)
            text = f'{text}\n<script src="{script}"></script>\n' if draws else text.replace(DIAGRAM, "```\n")
        (source / page).parent.mkdir(parents=True, exist_ok=True)
        (source / page).write_text(text, encoding="utf-8")
        titles[page] = re.split("[,:]", re.search(r"(?m)^# (.+)$", text)[1])[0].replace("`", "")
    if broken:
        raise Faults("\n".join(broken))
    return titles


def rendered_readme(template: Path) -> str:
    """Returns the README of a project that is rendered with the default answers."""
    with tempfile.TemporaryDirectory() as folder:
        command = (sys.executable, "-m", "cookiecutter", "--no-input", "--default-config", "--output-dir", folder)
        subprocess.run([*command, str(template)], check=True, stdout=subprocess.DEVNULL)
        (readme,) = Path(folder).glob("*/README.md")
        return readme.read_text(encoding="utf-8")


def with_links_of_site(text: str, file: str, pages: Pages, template: Path) -> tuple[str, list[str], list[str]]:
    """Returns a page with links between the site's pages, the pictures that it shows, and a line per broken link.

    `file` is the page's path in the repository. A link to a file that is not a page leads to the repository.
    """
    pictures, broken, folder = [], [], PurePosixPath(pages[file]).parent

    def site_link(match: re.Match[str]) -> str:
        path, anchor = _path_in_repository(file, match[0], template)
        if path is None:
            return match[0]
        if path in pages:
            return os.path.relpath(pages[path], folder) + anchor
        if not (template / path).exists():
            broken.append(f"{file}: {match[0]} leads nowhere")
        elif path.endswith((".png", ".svg")):
            pictures.append(path)
            return os.path.relpath(f"assets/{PurePosixPath(path).name}", folder)
        kind = "tree" if (template / path).is_dir() else "blob"
        return f"{REPOSITORY}/{kind}/main/{quote(path)}{anchor}"

    targets = r'(?m)(?<=\]\()[^)\s]+(?=[) ])|(?<=\ssrc=")[^"]+|(?<=\shref=")[^"]+|(?<=^\[\w\]: )\S+'
    code = r"((?m:^) *```[\s\S]*?\n *```|`[^`\n]+`)"
    parts = re.split(code, text)  # Every second one is code.
    parts[::2] = [re.sub(targets, site_link, part) for part in parts[::2]]
    return "".join(parts), pictures, broken


def _path_in_repository(file: str, link: str, template: Path) -> tuple[str | None, str]:
    """Returns the path that a link on a page leads to, and its anchor; None for other hosts and the page itself."""
    address, sign, anchor = link.partition("#")
    if ours := re.fullmatch(rf"{re.escape(REPOSITORY)}/(?:blob|tree)/main/(.*)", address):
        return unquote(ours[1]), sign + anchor
    if not address or re.match(r"[a-z]+:|//", address):
        return None, ""
    folders = [PurePosixPath(file).parent]
    if f"{PROJECT}/starters/" in file:  # Its files lie over the project's.
        folders.append(PurePosixPath(PROJECT, *folders[0].parts[3:]))
    paths = [os.path.normpath(folder / unquote(address)) for folder in folders]
    return next((path for path in paths if (template / path).exists()), paths[0]), sign + anchor


def fetch_mermaid(path: Path) -> bool:
    """Writes Mermaid's script, from the package index of npm; returns whether there is npm to fetch it."""
    if not shutil.which("npm"):
        print("npm is not installed, so diagrams are shown as text: install Node.js", file=sys.stderr)
        return False
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(["npm", "pack", MERMAID], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Faults(f"npm cannot fetch {MERMAID}:\n{done.stderr}")
        (package,) = Path(folder).iterdir()
        if base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode() != MERMAID_SHA512:
            raise Faults(f"{MERMAID} is not the package whose checksum is in docs/make_site.py")
        with tarfile.open(package) as files:
            path.write_bytes(files.extractfile(MERMAID_FILE).read())
    return True


# --- What was built ---------------------------------------------------------------------------------------------------


class Built(html.parser.HTMLParser):
    """The anchors, links and files that a built page has."""

    LOADS = ("script", "img", "source", "iframe", "embed", "video", "audio")
    LINKS = ("stylesheet", "icon", "preload", "prefetch", "modulepreload", "preconnect", "dns-prefetch", "manifest")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors, self.links, self.loads = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        of = dict(attributes)
        self.anchors |= {of[name] for name in ("id", "name") if of.get(name)}
        if tag == "a" and of.get("href"):
            self.links.append(of["href"])
        if tag in self.LOADS and of.get("src"):
            self.loads.append(of["src"])
        if tag == "link" and set((of.get("rel") or "").split()) & set(self.LINKS):
            self.loads.append(of["href"])


def faults(site: Path) -> Iterator[str]:
    """Yields a line for each link of the built site that leads nowhere, and for each file of another host."""
    pages = {path: Built(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site} has no page"
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        for link in page.loads:
            if urlsplit(link).netloc:
                yield f"{name}: {link} is fetched from another host"
        for link in page.links + page.loads:
            parts = urlsplit(link.removeprefix(ADDRESS) if link.startswith(ADDRESS) else link)
            if parts.scheme or parts.netloc:
                continue
            # The page for addresses that are not there names all others from the site's root.
            local = parts.path.removeprefix(urlsplit(ADDRESS).path) if parts.path.startswith("/") else parts.path
            folder = site if parts.path.startswith("/") else path.parent
            target = Path(os.path.normpath(folder / unquote(local))) if local else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                yield f"{name}: {link} leads nowhere"
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                yield f"{name}: {link} has no such anchor"
    for path in sorted(site.rglob("*.css")):
        for link in re.findall(r"(?:url\(|@import )[\"']?((?:https?:)?//[^\"')]+)", path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site).as_posix()}: {link} is fetched from another host"


if __name__ == "__main__":
    main()
