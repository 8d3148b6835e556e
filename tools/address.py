"""Where the repository lives, and what files say about it: `python -m tools.address && python notebooks/header.py` writes them.

None: the repository has no public address. Then there are no badges, no line for uvx, links are relative, and the lines that
install are those of a checkout. A file has a line with `python -m tools.address: NAME` before a block and one with `end` after
it.
"""

import re
from pathlib import Path

REPOSITORY: str | None = None  # such as "https://github.com/OWNER/nanoinfer"
TEST_MINUTES = 9  # of `make test`, on two cores
ROOT = Path(__file__).parents[1]
FILES = (
    *("README.md", "README.zh.md", "SECURITY.md", "CITATION.cff", "pyproject.toml"),
    *(".github/ISSUE_TEMPLATE/config.yml", "docs/usage.md", "docs/teaching.md"),
)
BLOCK = re.compile(
    r"^([^\n]*python -m tools\.address: ([\w ]+?)(?: -->)?\n)(?:(?!python -m ).)*?^((?:<!-- |# )end(?: -->)?)$",
    re.DOTALL | re.MULTILINE,
)
LINK = re.compile(r"\]\((?:https://[^)\s]+?/blob/main/|\.\./)([^)#\s]+)")  # of a notebook, to another file of the repository


def site_of(repository: str) -> str:
    """The address of the documentation, which GitHub publishes."""
    owner, name = repository.removeprefix("https://github.com/").split("/")
    return f"https://{owner}.github.io/{name}/"


def colab_of(repository: str, notebook: str) -> str:
    """The address that opens a notebook in Colab."""
    return (
        f"{repository.replace('https://github.com', 'https://colab.research.google.com/github')}/blob/main/notebooks/{notebook}"
    )


def _badges(repository: str | None, alt: tuple[str, str], other: str) -> str:
    if repository is None:
        return other
    codespaces = repository.replace("https://github.com", "https://codespaces.new")
    first, second = alt
    return (
        f'<a href="{colab_of(repository, "00b_an_engine_in_60_lines.ipynb")}"><img src="docs/pictures/badge-colab.svg" '
        f'alt="{first}"></a> <a href="{codespaces}"><img src="docs/pictures/badge-codespaces.svg" alt="{second}"></a> · {other}'
    )


def _start(repository: str | None, checkout: str, demo: str, test: str) -> str:
    folder = f"cd nanoinfer{checkout}" if repository is None else f"git clone {repository} && cd {repository.rsplit('/', 1)[1]}"
    return f"```\n{folder}\nmake demo TORCH=cpu   # {demo}\nmake test TORCH=cpu   # {test}\n```"


def _uvx(repository: str | None, command: str) -> str:
    return "" if repository is None else f"```\nuvx --torch-backend cpu --from git+{repository} nanoinfer {command}\n```"


def _one_file(repository: str | None) -> str:
    if repository is None:
        return "`--solved` exports the engine's own functions."
    site = site_of(repository)
    return (
        f"`--solved` exports the engine's own functions: the [engine in one file]({site}engine.py), with its tests as\n"
        f"[an archive]({site}nanoinfer-in-one-file.zip), which release.yml adds to a release."
    )


def _on_an_index(repository: str | None) -> str:
    """What a package index, which has no files, shows of README: public links and pictures, or neither."""
    if repository is None:
        pairs = [(r"\[([^]\[]+)\]\((?!https?:|#)[^)]+\)", r"\1"), (r"(?s)<picture>.*?</picture>|<p>\s*<img.*?</p>", "")]
    else:
        raw = repository.replace("github.com", "raw.githubusercontent.com")
        pairs = [(r"\]\((?!https?:|#)([^)]+)\)", rf"]({repository}/blob/main/\1)")]
        pairs += [(r'(src|srcset)="(?!https?:)([^"]+)"', rf'\1="{raw}/main/\2"')]
    head = "[[tool.hatch.metadata.hooks.fancy-pypi-readme.substitutions]]"
    return "\n\n".join(f"{head}\npattern = '{pattern}'\nreplacement = '{new}'" for pattern, new in pairs)


def blocks(repository: str | None) -> dict[str, str]:
    """What the files have between their marks, by name."""
    report = "Report a vulnerability privately"
    if repository is None:
        security, urls, citation, contact = f"{report} to the authors.", "", "", ""
    else:
        advisories, site = f"{repository}/security/advisories/new", site_of(repository)
        security = f"{report}:\n[Security, Report a vulnerability]({advisories})."
        urls = f'[project.urls]\nRepository = "{repository}"\nDocumentation = "{site}"\n'
        urls += f'Changelog = "{repository}/blob/main/CHANGELOG.md"\nIssues = "{repository}/issues"'
        citation = f"repository-code: {repository}\nurl: {site}"
        contact = f"contact_links:\n  - name: A vulnerability\n    url: {advisories}\n    about: Please report it privately."
    english = ("Open notebook 00b in Colab", "Open this repository in Codespaces")
    chinese = ("在 Colab 中打开 notebook 00b", "在 Codespaces 中打开本仓库")
    words = ("creates .venv and generates a story", f"runs the linters, the type checker and all tests: {TEST_MINUTES} minutes")
    chinese_words = ("创建 .venv，并生成一个故事", f"运行代码检查、类型检查和全部测试：{TEST_MINUTES} 分钟")
    return {
        "badges": _badges(repository, english, "[中文](README.zh.md)"),
        "badges zh": _badges(repository, chinese, "[English](README.md)"),
        "start": _start(repository, "          # your checkout", *words),
        "start zh": _start(repository, "          # 本仓库的目录", *chinese_words),
        "uvx": _uvx(repository, 'explain "Once upon a time"'),
        "uvx usage": _uvx(repository, 'generate "Once upon a time"'),
        "security": security,
        "one file": _one_file(repository),
        "urls": urls,
        "citation": citation,
        "contact": contact,
        "index": _on_an_index(repository),
    }


def with_blocks(text: str, repository: str | None = REPOSITORY) -> str:
    """Return a file with its blocks written anew."""
    found = blocks(repository)

    def block(match: re.Match[str]) -> str:
        inner = found[match[2]]
        gap = "\n" if match[3].startswith("<") else ""  # Markdown ends a comment with an empty line
        return f"{match[1]}{gap}{inner}{gap if inner else ''}{chr(10) if inner else ''}{match[3]}"

    return BLOCK.sub(block, text)


def with_links(text: str, repository: str | None = REPOSITORY) -> str:
    """Return Markdown of a notebook with links to files of the repository, public or relative. Colab has no files beside it."""

    def link(match: re.Match[str]) -> str:
        if not (ROOT / match[1]).exists():
            return match[0]
        return f"]({f'{repository}/blob/main' if repository else '..'}/{match[1]}"

    return LINK.sub(link, text)


def main() -> None:
    for name in FILES:
        path = ROOT / name
        path.write_text(with_blocks(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
