"""Find out how nanoinfer was installed, for messages that name a command of pip."""

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).parents[2]  # a checkout, or site-packages


def install_command(extra: str) -> str:
    """Return the command that adds an extra's packages: to a checkout, to a copy of a checkout, or to a release.

    A checkout is installed with -e, because otherwise edits of its source would no longer take effect.
    """
    if (ROOT / "pyproject.toml").exists():
        return f'pip install -e "{ROOT}[{extra}]"'
    try:
        origin = json.loads(distribution("nanoinfer").read_text("direct_url.json") or "{}")  # PEP 610
    except PackageNotFoundError:
        origin = {}
    if not origin:
        return f'pip install "nanoinfer[{extra}]"'
    scheme = f"{origin['vcs_info']['vcs']}+" if "vcs_info" in origin else ""
    return f'pip install "nanoinfer[{extra}] @ {scheme}{origin["url"]}"'
