"""`nanoinfer bench compare`: hand-computed intervals, and which reports are refused."""

import json
import math
from dataclasses import asdict

import pytest
from typer.testing import CliRunner

from nanoinfer.cli.main import app
from nanoinfer_lab.bench.comparison import geometric_mean
from nanoinfer_lab.bench.timing import Measurement, RequestTiming, Run, figures
from nanoinfer_lab.bench.workloads import Workload


def report(*seconds, **changes):
    """What `bench --json` prints of runs with one request, whose 10 tokens take the given seconds. changes: other parts."""
    runs = []
    for each in seconds:
        timings = [RequestTiming(0.0, [each / 10 * (i + 1) for i in range(10)], 4, 10, "length")]
        runs.append(Run.of(figures(timings), timings, {}, {}))
    workload = Workload(name="yours", input_lens=(4,), output_lens=(10,))
    parts = {"machine": {"CPU": "Z"}, "versions": {"torch": "2"}, "settings": {"max_num_seqs": 256}}
    return parts | {"results": [asdict(Measurement.of(workload, runs))]} | changes


def compare(folder, first, second, *options):
    for name, found in (("a", first), ("b", second)):
        (folder / f"{name}.json").write_text(json.dumps(found))
    return CliRunner().invoke(app, ["bench", "compare", str(folder / "a.json"), str(folder / "b.json"), *options])


def test_an_interval_is_that_of_the_t_distribution():
    """Logarithms 0, 1, 2: mean 1, standard error 1 / sqrt(3), and 2 degrees of freedom, whose t is 4.303."""
    found = geometric_mean([1.0, math.e, math.e**2])
    assert found.mean == pytest.approx(math.e)
    assert (math.log(found.low), math.log(found.high)) == pytest.approx((1 - 4.303 / math.sqrt(3), 1 + 4.303 / math.sqrt(3)))


def test_the_interval_of_a_ratio_is_welchs():
    """Logarithms 0, 1, 2 (squared error 1/3, 2 degrees) by 0, 2 (squared error 1, 1 degree).

    Together 4/3, with (4/3)^2 / ((1/9)/2 + 1/1) = 1.68 degrees, rounded down to 1, whose t is 12.706. The mean is 1 - 1.
    """
    found = geometric_mean([1.0, math.e, math.e**2], [1.0, math.e**2])
    half = 12.706 * math.sqrt(4 / 3)
    assert [math.log(end) for end in (found.mean, found.low, found.high)] == pytest.approx([0, -half, half])


def test_equal_samples_have_the_degrees_of_both_and_a_single_run_has_no_interval():
    """Two samples of 2 with the same squared error 1 have 2 degrees together."""
    found = geometric_mean([1.0, math.e**2], [math.e, math.e**3])
    assert math.log(found.high) == pytest.approx(-1 + 4.303 * math.sqrt(2))
    alone = geometric_mean([8.0], [2.0, 2.0])
    assert (alone.low, alone.mean) == (None, pytest.approx(4))


def test_the_words_say_what_differs_and_what_does_not(tmp_path):
    """Ten tokens in 1 s, and in 2 s: half of the speed. Then runs that overlap."""
    slower = report(2.0, 2.02, 1.98, settings={"max_num_seqs": 8})
    result = compare(tmp_path, report(1.0, 1.01, 0.99), slower, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    verdicts = {one["figure"]: one["verdict"] for one in found["comparisons"]}
    assert verdicts == {"output tok/s": "lower"} | dict.fromkeys(list(verdicts)[1:], "higher")
    assert "TTFT p50, ms" in verdicts
    speed = found["comparisons"][0]
    assert (speed["ratio"]["mean"], speed["first"]["mean"]) == (pytest.approx(0.5, rel=1e-4), pytest.approx(10, rel=1e-3))
    assert found["settings"] == ["max_num_seqs 256 and 8"]
    table = compare(tmp_path, report(1.0, 1.5, 0.8), report(0.9, 1.4, 1.1)).stdout
    assert "no difference shown" in " ".join(table.split())
    assert "a single run" in " ".join(compare(tmp_path, report(1.0), report(1.0, 1.1)).stdout.split())


def test_other_machines_versions_and_failures_are_warned_of(tmp_path):
    failed = report(1.0, 1.1, machine={"CPU": "Y"}, versions={"torch": "3"})
    failed["results"][0]["runs"][0]["requests"][0]["error"] = "refused"
    result = compare(tmp_path, report(1.0, 1.1), failed)
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        "warning: different machine: CPU Z and Y",
        "warning: different versions: torch 2 and 3",
        f"warning: failed requests of {tmp_path / 'b.json'}, which are in no figure: 1",
    ]
    assert compare(tmp_path, report(1.0), report(1.0)).stderr == ""


def test_reports_of_different_workloads_and_what_is_no_report_are_refused(tmp_path):
    longer = report(1.0)
    longer["results"][0]["workload"]["input_lens"] = [5]
    result = compare(tmp_path, report(1.0), longer)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "workload yours is not the same in both reports, its input_lens differ" in result.stderr
    longer["results"][0]["workload"]["name"] = "B16"
    assert "different workloads, yours and B16; measure the same" in compare(tmp_path, report(1.0), longer).stderr
    for text, words in (("[]", "is not a report; `nanoinfer bench"), ("{", "cannot be read (")):
        (tmp_path / "a.json").write_text(text)
        result = CliRunner().invoke(app, ["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")])
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert words in result.stderr
