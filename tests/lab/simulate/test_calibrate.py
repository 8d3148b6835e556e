"""Calibrating on runs of a machine finds its limits: the fitted machine has the times of a run that it has not seen."""

import json
from dataclasses import asdict, replace

import pytest
from typer.testing import CliRunner

from nanoinfer.cli.main import app
from nanoinfer.config import EngineArgs
from nanoinfer.errors import InvalidValueError
from nanoinfer_lab.bench.timing import figures
from nanoinfer_lab.bench.workloads import Workload
from nanoinfer_lab.simulate.calibrate import read_runs
from nanoinfer_lab.simulate.hardware import Hardware
from nanoinfer_lab.simulate.simulator import requests_of, simulate
from tests.lab.simulate.test_simulator import CONFIG, REAL, SIZES

FEW = Workload(name="yours", input_lens=(40, 9, 120), output_lens=(6, 9, 4), arrivals=(0.0, 0.2, 0.5))
MANY = Workload(name="yours", input_lens=(20,) * 8, output_lens=(5,) * 8)
OTHER = Workload(name="other", input_lens=(10, 50, 90, 30), output_lens=(9, 3, 6, 7), arrivals=(0.0, 0.01, 0.02, 0.3))


def timings_on(hardware, workload):
    return simulate(SIZES, hardware, EngineArgs(), requests_of(workload)).timings


def report(path, workload):
    """What `bench serve --json` would print of a server on the machine REAL."""
    rows = [timing.row(0.0) for timing in timings_on(REAL, workload)]
    path.write_text(json.dumps({"results": [{"workload": asdict(workload), "runs": [{"requests": rows}]}]}), encoding="utf-8")
    return str(path)


@pytest.mark.slow
def test_a_machine_is_found_from_a_run_of_few_and_a_run_of_many_requests(tmp_path):
    wrong = replace(
        REAL, bandwidth=3 * REAL.bandwidth, rates={"float32": 2e9}, overheads=replace(REAL.overheads, per_step_s=1e-3)
    )
    config, start, output = (tmp_path / name for name in ("config.json", "start.json", "server.json"))
    config.write_text(json.dumps(CONFIG), encoding="utf-8")
    start.write_text(json.dumps(asdict(wrong)), encoding="utf-8")
    runs = report(tmp_path / "few.json", FEW), report(tmp_path / "many.json", MANY)
    given = ["bench", "calibrate", *runs, "-m", str(config), "--hardware", str(start), "-o", str(output)]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output
    found = Hardware.named(str(output))
    expected, fitted, before = (figures(timings_on(hardware, OTHER)) for hardware in (REAL, found, wrong))
    assert fitted.ttft_ms.p50 == pytest.approx(expected.ttft_ms.p50, rel=0.05)
    assert fitted.tpot_ms.p50 == pytest.approx(expected.tpot_ms.p50, rel=0.05)
    assert before.ttft_ms.p50 != pytest.approx(expected.ttft_ms.p50, rel=0.2)


def test_a_file_of_another_form_is_refused(tmp_path):
    path = tmp_path / "other.json"
    for text in ("{}", '{"results": [{"workload": "B16", "runs": [{}]}]}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InvalidValueError, match=r"other.json must be what `nanoinfer bench serve --json` printed"):
            read_runs(path)
    report(path, FEW)
    wrong = path.read_text(encoding="utf-8").replace('"num_output_tokens": 9', '"num_output_tokens": 8')
    path.write_text(wrong, encoding="utf-8")
    with pytest.raises(InvalidValueError, match="an answer has 8 tokens instead of 9"):
        read_runs(path)
