"""MkDocs hooks: the site has the repository's files at their own paths, so that their relative links work on both.

docs/ with index.md as the first page, notebooks/, BENCHMARKS and CHANGELOG are pages, the solutions with what they print, and
the one file in chapters. The API reference is made from the docstrings, the gallery by gallery.py, the data of interactive
parts by interactive.py. A link to another file of the repository leads to its public address, and is text where there is none.
A link to README leads to the first page. Formulas become MathML, which needs no script. The search reads no code of notebooks,
solutions, the API and the one file. llms.txt lists the pages for language models. python/ has Pyodide and the package, for
browser.py. At the end every link inside the site is checked.
"""

import html
import logging
import re
import shutil
import subprocess
import sys
import tarfile
from base64 import b64decode
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from jinja2 import Environment
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.plugins")
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs"), str(ROOT / "notebooks")]
from gallery import write  # noqa: E402
from header import NOTEBOOKS, number_of, title_of  # noqa: E402
from interactive import python_archive, with_data  # noqa: E402
from parameters import reference  # noqa: E402

import one_file  # noqa: E402
from tools.address import REPOSITORY  # noqa: E402

HOME = "docs/index.md"
NAVIGATION = {  # the pages of docs/ in each part of the site. The rest is a further part, so no page is forgotten
    "Learn": ("tasks", "scheduler_game", "teaching"),
    "Use": ("tutorial", "usage", "faq", "coming_from", "vllm", "supported", "serving", "agents", "checkpoints", "names"),
    "Understand": ("reading", "architecture", "compiled", "structure", "glossary"),
    "Project": ("contributing",),
    "Appendix": ("scaling",),
}
TEXT = r"\[((?:[^]\[]|\[[^]]*\])*)"  # of a Markdown link
LINK = re.compile(TEXT + r"\]\((?!https?:|#)([^)#\"\s]+)(#[^)\"\s]*)?\)")
MARKDOWN_CELL = re.compile(r'<div class="[^"]*jp-RenderedMarkdown.*?</div>', re.DOTALL)
FIGURE = re.compile(r'<img [^>]*src="data:image/svg\+xml;base64,([^"]+)"')
# Code, what it prints, its copy for the clipboard, and prompts. Material leaves out only elements that contain none of their
# own kind.
CODE = re.compile(r'<(?:pre|div class="clipboard-copy-txt"|div class="jp-\w+Prompt[^"]*"|span class="notice")')
PYODIDE = "0.28.3"  # the version of the package on npm
PYODIDE_FILES = ("pyodide.js", "pyodide.asm.js", "pyodide.asm.wasm", "pyodide-lock.json", "python_stdlib.zip")
FIGURE_CODE = re.compile(
    r'(celltag_figure"[^>]*>\s*)(<div class="jp-Cell-inputWrapper".*?)(?=<div class="jp-Cell-outputWrapper")', re.DOTALL
)
CELL = '<div class="jp-Cell '
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$(.+?)\$", re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation, and the link to the repository. (Material's own, repo_url, would call GitHub's API from every page.)"""
    parts: dict[str, list[Any]] = {name: [f"docs/{page}.md" for page in pages] for name, pages in NAVIGATION.items()}
    known = {"index", *(page for pages in NAVIGATION.values() for page in pages)}
    parts["Appendix"] += sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md") if path.stem not in known)
    deep_dives = [f"notebooks/{stem}.ipynb" for stem in NOTEBOOKS if stem.startswith("d")]
    chapters = [f"notebooks/{stem}.ipynb" for stem in NOTEBOOKS if not stem.startswith("d")]
    solutions = [f"notebooks/solutions/{stem}.md" for stem in NOTEBOOKS]
    course: list[Any] = [{"The course": chapters}, {"Deep dives": deep_dives}, {"Solutions": solutions}]
    parts["Learn"] = [{"Map": "notebooks/README.md"}, *course, {"Gallery": "gallery/index.md"}, *parts["Learn"]]
    in_one_file = {"The engine in one file": ["one_file/README.md", "one_file/engine.md"]}
    parts["Understand"] = [in_one_file, *parts["Understand"], {"API": "api.md"}]
    parts["Project"] += [
        {"Benchmarks": "BENCHMARKS.md"},
        {"Leaderboard": "LEADERBOARD.md"},
        {"Changelog": "CHANGELOG.md"},
        *([{"GitHub": REPOSITORY}] if REPOSITORY else []),
    ]
    config.nav = [{"Home": HOME}, {"中文": "README.zh.md"}, *({name: pages} for name, pages in parts.items())]
    return config


@event_priority(100)  # before mkdocs-jupyter, which converts the notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files of the site, at the paths that they have in the repository, except that of the first page."""

    def file(path: Path, folder: Path) -> File:
        name = path.relative_to(folder).as_posix()
        place = "index.html" if name == HOME else None
        return File(name, str(folder), config.site_dir, config.use_directory_urls, dest_uri=place)

    patterns = [
        "README.zh.md",
        "BENCHMARKS.md",
        "LEADERBOARD.md",
        "CHANGELOG.md",
        "one_file/README.md",
        "docs/*.md",
        "docs/pictures/*.*",
        "docs/site.css",
        "docs/*.js",
        "notebooks/README.md",
        "notebooks/[0-9d]*.ipynb",
        "notebooks/pictures/*.svg",
    ]
    of_the_theme = [one for one in files if one.src_dir != config.docs_dir]
    found = Files(of_the_theme + [file(path, ROOT) for pattern in patterns for path in sorted(ROOT.glob(pattern))])
    gallery = Path(config.site_dir).parent / "gallery"
    found.append(File.generated(config, "gallery/index.md", content=write(gallery)))
    for path in sorted(gallery.glob("*.html")):
        found.append(file(path, gallery.parent))
    for stem in NOTEBOOKS:
        found.append(File.generated(config, f"notebooks/solutions/{stem}.md", content=solution_page(stem)))
    found.append(File.generated(config, "one_file/engine.md", content=one_file.chapters()))
    found.append(File.generated(config, "api.md", content="\n\n".join(["# API", *reference()])))
    for name, content in python_files(Path(config.site_dir).parent).items():
        found.append(File.generated(config, f"python/{name}", content=content))
    return found


def python_files(folder: Path) -> dict[str, bytes]:
    """The files of python/ by name. npm fetches Pyodide into the folder, once. There are none if it cannot."""
    package, npm = folder / f"pyodide-{PYODIDE}.tgz", shutil.which("npm")
    if npm and not package.exists():
        subprocess.run([npm, "pack", f"pyodide@{PYODIDE}"], cwd=folder, capture_output=True)
    if not package.exists():
        log.info("the pages cannot run Python, because npm did not fetch Pyodide")
        return {}
    with tarfile.open(package) as archive:
        files = {name: archive.extractfile(f"package/{name}").read() for name in PYODIDE_FILES}  # type: ignore[union-attr]
    return files | {"nanoinfer.zip": python_archive()}


def solution_page(stem: str) -> str:
    """The Markdown of a solution and what it prints."""
    source = ROOT / "notebooks" / "solutions" / f"{stem}.py"
    output = source.with_suffix(".txt")
    parts = [f"# Solutions {number_of(stem)}", f"Of the exercises in [{title_of(stem)}](../{stem}.ipynb)."]
    parts.append(f"```python\n{source.read_text(encoding='utf-8')}```")
    if output.exists():
        parts.append(f"It prints:\n\n```text\n{output.read_text(encoding='utf-8')}```")
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files that are no pages lead to the repository, or leave their text."""

    def link(match: re.Match[str]) -> str:
        target = (ROOT / page.file.src_uri).parent.joinpath(match[2]).resolve()
        uri = target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else ""
        if uri == one_file.FILE:
            return f"[{match[1]}]({match[2].removesuffix('.py')}.md{one_file.anchor(match[3])})"
        if uri == "README.md":
            return f"[{match[1]}]({match[2].removesuffix(uri)}{HOME})"
        if files.get_file_from_path(uri) or not target.exists():
            return match[0]
        if REPOSITORY is None:
            return match[1]
        return f"[{match[1]}]({REPOSITORY}/{'tree' if target.is_dir() else 'blob'}/main/{uri}{match[3] or ''})"

    return LINK.sub(link, markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Insert the data of interactive parts. Convert what Markdown's extensions do not see of a notebook."""
    content = re.sub(r"<th([^>]*)></th>", r"<td\1></td>", with_data(content))  # a screen reader reads headers
    if page.file.src_uri.startswith(("notebooks/", "api.", "one_file/engine")):
        content = CODE.sub(r"\g<0> data-search-exclude", content)
    if page.file.src_uri == "README.zh.md":  # whose address is a folder, and MkDocs changes no HTML
        content = re.sub(r'(src|srcset)="docs/', r'\1="../docs/', content)
    if not page.file.src_uri.endswith(".ipynb"):
        return content

    def formula(match: re.Match[str]) -> str:
        return convert(html.unescape(match[1] or match[2]), display="block" if match[1] else "inline")

    def named(match: re.Match[str]) -> str:  # nbconvert says only that there is no description
        found = re.search(r'aria-label="([^"]*)"', b64decode(match[1]).decode())
        return f'<img alt="{found[1] if found else ""}" src="data:image/svg+xml;base64,{match[1]}"'

    for entry in page.toc.items[0].children:  # the anchor of a heading with code has the code, too, but not in the contents
        if found := re.search(rf'<h2 id="({re.escape(entry.id)}[^"]*)"', content):
            entry.id = found[1]
    content = re.sub("<img[^>]*colab-badge[^>]*>", "Open in Colab", content)  # Google's picture
    content = content.replace("Open in Colab</a> Colab", "Open in Colab</a>. Colab")
    content = re.sub(r'href="(\w+)\.ipynb(#[^"]*)?"', r'href="../\1/\2"', content)
    content = re.sub(r'href="\.\./((?:docs/)?\w+)\.md"', r'href="../../\1/"', content)
    content = re.sub(r'src="(pictures/|\.\./docs/)', r'src="../\1', content)
    content = re.sub(r'href="[^"]*/notebooks/solutions/(\w+)\.py"', r'href="../solutions/\1/"', content)
    content = re.sub(r'href="[^"]*/notebooks/README\.md"', 'href="../"', content)
    content = re.sub(r'<a href="\.\./(?:nanoinfer\w*|tests)/[^>]*>(.*?)</a>', r"\1", content)  # without a public address
    content = folded(FIGURE.sub(named, content))
    return MARKDOWN_CELL.sub(lambda cell: FORMULA.sub(formula, cell[0]), content)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Name the theme's dialog for screen readers."""
    return output.replace(
        'data-md-component="search" role="dialog"', 'data-md-component="search" role="dialog" aria-label="Search"'
    )


def on_env(env: Environment, config: MkDocsConfig, files: Files) -> None:
    """Add llms.txt (https://llmstxt.org): the title and address of every page, by the parts of the navigation."""
    page, parts = files.src_uris[HOME].page, {}
    while page is not None:
        part = page.ancestors[-1].title if page.ancestors else "Start"
        parts.setdefault(part, []).append(f"- [{page.title}]({page.url or './'})")
        page = page.next_page
    sections = ["\n\n".join([f"## {part}", "\n".join(links)]) for part, links in parts.items()]
    text = "\n\n".join([f"# {config.site_name}", f"> {config.site_description}", *sections])
    files.append(File.generated(config, "llms.txt", content=f"{text}\n"))


def folded(content: str) -> str:
    """Fold what Jupyter shows folded: the code of figures, and sections of questions, which end at the next heading."""
    fold = '<details class="fold"><summary>{}</summary>'.format
    content = FIGURE_CODE.sub(rf"\1{fold('the code of this figure')}\2</details>", content)
    if (at := content.find("celltag_questions")) >= 0:
        start = content.index(CELL, at)
        end = content.rindex(CELL, start, content.index("<h2", start))
        content = f"{content[:start]}{fold('the answers')}{content[start:end]}</details>{content[end:]}"
    return content


def on_post_build(config: MkDocsConfig) -> None:
    """Lead from the notebooks' former addresses to the new ones. Raise an error if a link inside the site leads nowhere.

    MkDocs does not look into notebooks and raw HTML.
    """
    site, broken = Path(config.site_dir), []
    for stem, header in NOTEBOOKS.items():
        for folder in ("notebooks", "notebooks/solutions") if header.former else ():
            moved = site / folder / stem.replace(number_of(stem), header.former, 1) / "index.html"
            moved.parent.mkdir()
            to = f"../{stem}/"
            moved.write_text(f'<meta http-equiv="refresh" content="0; url={to}"><a href="{to}">{stem}</a>', encoding="utf-8")
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("index.html")}
    for path, text in pages.items():
        for link in set(re.findall(r'(?:href|src|srcset)="(?!https?:|data:|mailto:)([^"]+)"', text)):
            name, _, anchor = html.unescape(link).partition("#")
            target = path.parent.joinpath(unquote(name)).resolve() if name else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (anchor and target in pages and f'id="{unquote(anchor)}"' not in pages[target]):
                broken.append(f"{path.relative_to(site)}: {link}")
    if broken:
        raise PluginError("links that lead nowhere:\n" + "\n".join(sorted(broken)))
