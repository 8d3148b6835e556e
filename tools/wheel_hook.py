"""Put the libraries of tools/libraries.py into the wheel, and name the systems that it is for.

hatchling calls this in `make wheel`.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class LibrariesHook(BuildHookInterface[Any]):  # type: ignore[misc]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.root, "build", "libraries")
        contents = b"".join(path.read_bytes() for path in folder.glob("*/*.so"))
        needed = max(int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", contents))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_2_{needed}_x86_64"
        build_data["force_include"][str(folder)] = "nanoinfer/fast/cpu/libraries"
