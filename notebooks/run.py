"""Run notebooks and solutions and keep what they show: all of them, or those named. `make notebooks` does it."""

import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch's threads do not spin while another process has the core

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
EVERYTHING = [*sorted(FOLDER.glob("[0-9d]*.ipynb")), *sorted(FOLDER.glob("solutions/[0-9d][0-9]*.py"))]

for path in [Path(name) for name in sys.argv[1:]] or EVERYTHING:
    if path.suffix == ".py":  # a solution: what it prints is kept beside it
        places = os.pathsep.join([str(FOLDER.resolve()), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": places, "MPLBACKEND": "agg"}
        run = subprocess.run([sys.executable, path], env=environment, stdout=subprocess.PIPE, check=True)
        path.with_suffix(".txt").write_bytes(run.stdout)
    else:
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
