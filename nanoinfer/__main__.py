"""Run the `nanoinfer` command: `python -m nanoinfer`."""

from nanoinfer.cli.main import app

app()
