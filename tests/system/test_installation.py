"""The command of pip that a message names is true for every way of installing nanoinfer."""

import json
from types import SimpleNamespace

import pytest

from nanoinfer.system import installation


def test_a_checkout_stays_editable():
    assert installation.install_command("server") == f'pip install -e "{installation.ROOT}[server]"'


@pytest.mark.parametrize(
    ("origin", "what"),
    [
        (None, "nanoinfer[server]"),
        ({"url": "file:///src/nanoinfer", "dir_info": {}}, "nanoinfer[server] @ file:///src/nanoinfer"),
        ({"url": "https://host/one.git", "vcs_info": {"vcs": "git"}}, "nanoinfer[server] @ git+https://host/one.git"),
    ],
)
def test_a_copy_names_where_it_came_from(origin, what, tmp_path, monkeypatch):
    text = origin and json.dumps(origin)
    monkeypatch.setattr(installation, "ROOT", tmp_path)  # site-packages has no pyproject.toml
    monkeypatch.setattr(installation, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))
    assert installation.install_command("server") == f'pip install "{what}"'
