"""The lines of the Dockerfile, carried out in their order in an empty folder, with what .dockerignore lets through.

Nothing is downloaded: of `apt-get` and `pip install` only the inputs are checked, and the wheel is built where hatchling is
installed. The folder is the image, so what an earlier line has not copied is not there.
"""

import fnmatch
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8")
# What the lines need of a system that this test does not have: programs of the base image.
OF_THE_SYSTEM = ("apt-get", "rm", "useradd", "mkdir", "chown")


class Image:
    """An empty folder in which each line is carried out. settings: of ENTRYPOINT, CMD, EXPOSE, USER, HEALTHCHECK and FROM."""

    def __init__(self, folder, ignored=IGNORED):
        self.folder, self.workdir, self.settings, self.users = folder, folder, {}, {"root"}
        self._patterns = [line for line in ignored.splitlines() if line and not line.startswith("#")]

    def build(self, dockerfile):
        lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", dockerfile, flags=re.MULTILINE)).splitlines()
        for line in filter(str.strip, lines):
            instruction, _, arguments = line.partition(" ")
            if instruction == "WORKDIR":
                self.workdir = self.inside(arguments)
                self.workdir.mkdir(parents=True, exist_ok=True)
            elif instruction in ("COPY", "RUN", "USER"):
                getattr(self, instruction.lower())(arguments)
            else:
                assert instruction in ("FROM", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"), f"{instruction} is not known"
                self.settings[instruction] = arguments
        return self

    def inside(self, path):
        """A path of the image, in the folder."""
        return self.folder / path.lstrip("/") if path.startswith("/") else self.workdir / path

    def is_in_context(self, path):
        """Whether a path, relative to the root of the repository, reaches the builder. The last matching pattern decides."""
        is_in, paths = True, [path, *list(path.parents)[:-1]]
        for pattern in self._patterns:
            bare = pattern.removeprefix("!").removeprefix("**/")
            for one in paths:
                if fnmatch.fnmatch(one.name if pattern.startswith("**/") else one.as_posix(), bare):
                    is_in = pattern.startswith("!")
        return is_in

    # ---- instructions

    def copy(self, arguments):
        *sources, target = arguments.split()
        for source in sources:
            files = [ROOT / source] if (ROOT / source).is_file() else [*(ROOT / source).rglob("*")]
            files = [file for file in files if file.is_file() and self.is_in_context(file.relative_to(ROOT))]
            assert files, f"COPY {source}: there is no such file, or .dockerignore excludes it"
            for file in files:
                inner = Path(file.name) if file == ROOT / source else file.relative_to(ROOT / source)
                copied = self.inside(target) / inner
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, copied)

    def run(self, arguments):
        for command in map(shlex.split, arguments.split("&&")):
            if command[:2] == ["pip", "install"]:
                self.install(command[2:])
            else:
                assert command[0] in OF_THE_SYSTEM, f"RUN {command[0]} is not known"
            if command[0] == "useradd":
                self.users.add(command[-1])
                (self.folder / "home" / command[-1]).mkdir(parents=True)
            if command[0] == "mkdir":
                self.inside(command[-1]).mkdir()
            if command[0] == "chown":
                assert command[1] in self.users, f"there is no user {command[1]} yet"
                assert self.inside(command[2]).exists(), f"{command[2]} is not there"

    def user(self, name):
        assert name in self.users, f"there is no user {name} yet"
        self.settings["USER"] = name

    def install(self, arguments):
        """Check what `pip install` and the build read, and build the wheel if that is possible without a download."""
        assert "USER" not in self.settings, "only root may install"
        constraints = arguments[arguments.index("-c") + 1]
        assert self.inside(constraints).is_file(), f"{constraints} is not copied"
        extras = re.fullmatch(r"\.\[(.*)\]", arguments[-1]).group(1).split(",")
        assert self.inside("pyproject.toml").is_file(), "pyproject.toml is not copied"
        project = tomllib.loads(self.inside("pyproject.toml").read_text(encoding="utf-8"))
        for name in extras:
            assert name in project["project"]["optional-dependencies"], f"there is no extra {name}"
        hatch = project["tool"]["hatch"]
        fragments = hatch["metadata"]["hooks"]["fancy-pypi-readme"]["fragments"]
        needed = [hatch["version"]["path"], *(one["path"] for one in fragments if "path" in one)]
        needed += [*project["project"]["license-files"], *hatch["build"]["targets"]["wheel"]["packages"]]
        missing = [path for path in needed if not [*self.workdir.glob(path)]]
        assert not missing, f"{', '.join(missing)} is not copied before pip install"
        self.settings["scripts"] = project["project"]["scripts"]
        if find_spec("hatchling") and find_spec("hatch_fancy_pypi_readme"):
            code = "import sys, hatchling.build; print(hatchling.build.build_wheel(sys.argv[1]))"
            out = self.folder / "wheels"
            subprocess.run([sys.executable, "-c", code, str(out)], cwd=self.workdir, check=True, capture_output=True)


def build(folder, dockerfile=DOCKERFILE, ignored=IGNORED):
    """Carry out the lines, and check what starts in the container. Returns: the Image, and the command that starts."""
    image = Image(folder, ignored)
    image.build(dockerfile)
    command = [*json.loads(image.settings["ENTRYPOINT"]), *json.loads(image.settings["CMD"])]
    assert command[0] in image.settings["scripts"], f"pyproject.toml has no script {command[0]}"
    context = parsed(command[1:])
    assert image.settings["USER"] != "root"
    port = context.params["port"]
    assert image.settings["EXPOSE"] == str(port), "another port is exposed"
    assert f"http://127.0.0.1:{port}/health" in image.settings["HEALTHCHECK"], "the health check asks another port"
    return image, command


def parsed(arguments):
    """The arguments of `nanoinfer serve`, as its command line reads them. Raises: click's error, for what it refuses."""
    from typer.main import get_command

    from nanoinfer.cli.main import app

    group = get_command(app)
    parent = group.make_context("nanoinfer", list(arguments), resilient_parsing=True)
    name, command, rest = group.resolve_command(parent, list(arguments))
    return command.make_context(name, rest, parent=parent)


def test_every_line_finds_what_it_needs_in_what_the_lines_before_it_have_copied(tmp_path):
    image, command = build(tmp_path)
    assert command[:2] == ["nanoinfer", "serve"]
    files = [path for path in ROOT.glob("nanoinfer*/**/*") if path.is_file() and "__pycache__" not in path.parts]
    names = [path.relative_to(ROOT).as_posix() for path in files]
    assert [name for name in names if not (image.inside("/src") / name).is_file()] == []
    assert [*tmp_path.rglob("__pycache__")] == []
    for wheel in (tmp_path / "wheels").glob("*.whl"):
        assert set(names) <= set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("constraints.txt README.md", "constraints.txt", "README.md is not copied before pip install"),
        ("README.md LICENSE", "README.md", "LICENSE is not copied before pip install"),
        ("constraints.txt README.md", "README.md", "constraints.txt is not copied"),
        ("COPY pyproject.toml", "COPY", "pyproject.toml is not copied"),
        ("COPY nanoinfer nanoinfer\n", "", "nanoinfer/__init__.py, nanoinfer is not copied before pip install"),
        ("COPY nanoinfer_lab nanoinfer_lab\n", "", "nanoinfer_lab is not copied before pip install"),
        ("COPY nanoinfer ", "COPY examples examples\nCOPY nanoinfer ", "COPY examples: .* or .dockerignore excludes it"),
        ("COPY nanoinfer nanoinfer", "COPY nanoinfers nanoinfer", "COPY nanoinfers: there is no such file"),
        (".[server,", ".[servers,", "there is no extra servers"),
        ("RUN useradd", "USER nanoinfer\nRUN useradd", "there is no user nanoinfer yet"),
        ("EXPOSE 8000", "EXPOSE 8001", "another port is exposed"),
        ("127.0.0.1:8000/health", "127.0.0.1:8001/health", "the health check asks another port"),
        ('["nanoinfer", "serve"', '["nanoinfers", "serve"', "no script nanoinfers"),
        ('"--host"', '"--hosts"', "(?i)no such option: --hosts"),
        ('"8000"]', '"8000x"]', "valid integer"),
    ],
)
def test_a_line_that_would_fail_is_found(tmp_path, before, after, words):
    assert DOCKERFILE.count(before) >= 1
    head, _, rest = DOCKERFILE.rpartition(before)
    with pytest.raises(Exception, match=words):
        build(tmp_path, head + after + rest)


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", "README.md", "LICENSE", "nanoinfer", "nanoinfer_course"])
def test_a_file_that_dockerignore_leaves_out_is_found(tmp_path, name):
    with pytest.raises(AssertionError, match=f"COPY {name}: there is no such file, or .dockerignore excludes it"):
        build(tmp_path, ignored=IGNORED.replace(f"!{name}\n", ""))


@pytest.mark.long
@pytest.mark.skipif(os.name == "nt", reason="needs the signals of POSIX")
def test_the_command_serves_from_what_was_copied_and_the_health_check_sees_it(tmp_path):
    image, command = build(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = str(unused.getsockname()[1])
    check = json.loads(image.settings["HEALTHCHECK"].partition("CMD ")[2])
    check = [sys.executable, *(argument.replace(":8000", f":{port}") for argument in check[1:])]
    module, _, function = image.settings["scripts"][command[0]].partition(":")
    start = f"import nanoinfer; print(nanoinfer.__file__, flush=True); from {module} import {function}; {function}()"
    arguments = [port if argument == "8000" else argument for argument in command[1:]]
    options = {
        "cwd": image.workdir,
        "env": os.environ | {"PYTHONPATH": str(image.inside("/src"))},
        "stderr": subprocess.DEVNULL,
    }
    assert subprocess.run(check, **options).returncode != 0
    with subprocess.Popen([sys.executable, "-c", start, *arguments], stdout=subprocess.PIPE, text=True, **options) as server:
        try:
            assert server.stdout.readline().startswith(str(image.inside("/src")))
            while subprocess.run(check, **options).returncode:
                assert server.poll() is None, "the server has ended"
                time.sleep(0.2)
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
