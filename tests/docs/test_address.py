"""tools/address.py alone says where the repository lives. Pages, notebooks and release files follow it."""

import importlib.util
import re

import nbformat
import pytest

from tools import address
from tools.address import FILES, REPOSITORY, ROOT, with_blocks, with_links

SPEC = importlib.util.spec_from_file_location("header", ROOT / "notebooks" / "header.py")
header = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(header)
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PUBLIC = "https://github.com/owner/name"
HOSTS = ("github.com", "colab.research.google.com/github", "codespaces.new", "raw.githubusercontent.com")
TEXTS = [
    "*.md",
    "*.cff",
    "*.toml",
    ".github/**/*.yml",
    "docs/*.*",
    "notebooks/*.*",
    "nanoinfer*/**/*.*",
    "examples/*",
    "tests/**/*.py",
]


@pytest.mark.parametrize("name", FILES)
def test_a_file_says_what_the_address_says(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert len(address.BLOCK.findall(text)) == len(re.findall(r"python -m tools\.address: ", text)) > 0  # each mark has its end
    assert with_blocks(text) == text, "run: python -m tools.address"


@pytest.mark.parametrize("name", FILES)
def test_a_file_gets_an_address_and_loses_it_again(name):
    text = with_blocks((ROOT / name).read_text(encoding="utf-8"), None)
    public = with_blocks(text, PUBLIC)
    assert "/owner" in public or "owner.github.io" in public
    assert with_blocks(public, None) == text != public


def test_without_an_address_there_are_no_badges_no_line_for_uvx_and_no_clone():
    pages = [with_blocks((ROOT / name).read_text(encoding="utf-8"), None) for name in FILES]
    for page in pages:
        assert not re.search(r"badge-colab|uvx --torch|git clone|github\.com/(?!owner)\w+/nanoinfer", page)
    assert "cd nanoinfer  " in pages[0]
    public = with_blocks(pages[0], PUBLIC)
    for line in (
        "badge-colab",
        f"git clone {PUBLIC} && cd name\n",
        f"uvx --torch-backend cpu --from git+{PUBLIC} nanoinfer explain",
    ):
        assert line in public


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_the_links_of_the_address(path):
    cells = nbformat.read(path, as_version=4).cells
    for cell in cells:
        if cell.cell_type == "markdown":
            assert with_links(cell.source) == cell.source, "run: python notebooks/header.py"
            assert with_links(with_links(cell.source, PUBLIC), None) == with_links(cell.source, None)
    if path.stem == "gpu":
        assert tuple(cell.source for cell in cells[:2]) == header.gpu_cells()
        assert f"git clone -q {PUBLIC}\n%cd name" in header.gpu_cells(PUBLIC)[1]
    else:
        assert f"git clone -q {PUBLIC} && pip" in header.header_of(path.stem, PUBLIC)
        assert "Colab" not in header.header_of(path.stem, None)


def test_a_link_of_a_notebook_to_a_file_becomes_public_and_others_stay():
    text = "[a](../docs/faq.md#questions), [b](03_pages.ipynb), [c](../nowhere.md), [d](https://x.org/y/z/blob/main/nowhere.md)"
    public = text.replace("../docs/faq.md", f"{PUBLIC}/blob/main/docs/faq.md")
    assert with_links(text, PUBLIC) == public
    assert with_links(public.replace("owner", "another"), PUBLIC) == public
    assert with_links(public, None) == text


def test_no_other_file_has_an_address_of_the_repository():
    """The name of the owner and this package, at any of the hosts, outside of blocks and of what header.py writes."""
    allowed = {"address.py", "test_address.py", "test_package.py"}
    owner, name = (REPOSITORY or "https://github.com/nanoinfer/nanoinfer").split("/")[-2:]
    pattern = re.compile(rf"({'|'.join(map(re.escape, HOSTS))})/{owner}/{name}\b|{owner}\.github\.io")
    assert pattern.search(address.colab_of(f"https://github.com/{owner}/{name}", "a.ipynb"))
    paths = {path for glob in TEXTS for path in ROOT.glob(glob) if path.is_file() and path.name not in allowed}
    assert len(paths) > 300
    texts = {path: path.read_text(encoding="utf-8", errors="replace") for path in paths if path.stat().st_size < 5_000_000}
    texts = {path: text for path, text in texts.items() if path.suffix != ".ipynb" or REPOSITORY is None}
    assert [path.name for path, text in texts.items() if pattern.search(address.BLOCK.sub("", text))] == []
