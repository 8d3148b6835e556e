"""`python -m nanoinfer` is the `nanoinfer` command."""

from nanoinfer.cli.main import app

app()
