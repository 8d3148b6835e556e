"""Run notebooks from top to bottom and keep what they show: all of them, or those named. `make notebooks` does it."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch's threads do not spin while another process has the core

import nbformat
from nbclient import NotebookClient

for path in [Path(name) for name in sys.argv[1:]] or sorted(Path(__file__).parent.glob("*.ipynb")):
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        record_timing=False,  # else every run would change every cell
        coalesce_streams=True,
        resources={"metadata": {"path": path.parent}},
    )
    client.execute()
    notebook.metadata.pop("language_info", None)
    nbformat.write(notebook, path)
    print(path)
