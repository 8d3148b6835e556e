"""`python -m nanoinfer` is the `nanoinfer` command."""

from nanoinfer.cli import app

app()
