"""The folders in which checkpoints are found: those of the package, and others."""

import os
from pathlib import Path

BUNDLED = Path(__file__).with_name("bundled")


def bundled_models() -> list[str]:
    return sorted(path.parent.name for path in BUNDLED.glob("*/config.json"))


def list_bundled() -> str:
    return f"bundled are {', '.join(bundled_models())}"


def list_folder(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except (OSError, ValueError):
        return []
