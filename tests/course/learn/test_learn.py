"""The learner's track: the engine's own functions pass, plausible wrong ones do not, and the commands keep their promises."""

import ast
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer
from typer.testing import CliRunner

from nanoinfer.attention.dense import causal_attention
from nanoinfer.cli.main import app
from nanoinfer.features.quantization.rounding import quantize
from nanoinfer.scheduling.prefix_index import Prefix
from nanoinfer_course import cli as learn
from nanoinfer_course.learn import speed
from nanoinfer_course.learn.check import check
from nanoinfer_course.learn.export import Own
from nanoinfer_course.learn.track import NAMES, TRACK, find
from nanoinfer_course.learn.workbook import Workbook, installed
from nanoinfer_lab.bench import ladder
from tests.course.learn import mutate
from tests.lab.testing.mutants import FEATURES

KNOWN = {name for kind in (torch, torch.Tensor, torch.finfo, str, list, dict) for name in dir(kind)}
# For each rule of a task, what replaces what in the engine's source: mistakes that a learner makes.
MUTANTS = {
    "accept_drafts": {
        "position": [("sampled_token_ids[num]", "sampled_token_ids[num + 1]")],
        "prefix": [("return num", "return sum(a == b for a, b in zip(self.draft_token_ids, sampled_token_ids))")],
        "all": [("num < len(self.draft_token_ids) and ", "num < len(self.draft_token_ids) - 1 and ")],
    },
    "argmax": {
        "rows": [("token_ids, -1)", "token_ids.int(), -1)"), ("max(dim=-1)", "max(dim=0)")],
        "ties": [("logits.max(dim=-1)", "logits.flip(-1).max(dim=-1)")],
        "finite": [
            ("torch.where(largest.isfinite(), token_ids, -1)", "token_ids"),
            ("largest.isfinite()", "~largest.isneginf()"),
        ],
    },
    "column_slice": {
        "cover": [
            ("(rank + 1) * total // size", "rank * total // size + total // size"),
            ("rank * total // size, ", "rank * (total // size), "),
            ("(rank + 1) * total // size", "min((rank + 1) * -(-total // size), total)"),
        ],
        "even": [
            (
                "rank * total // size, (rank + 1) * total // size",
                "rank * (total // size), total if rank == size - 1 else (rank + 1) * (total // size)",
            )
        ],
    },
    "held_text": {
        "longest": [
            ("range(self._num_shown if", "range(len(self.text) - 1 if"),
            ("return len(rest)", "return 1"),
        ],
        "proper": [("len(stop) > len(rest)", "len(stop) >= len(rest)")],
        "several": [("for stop in self._stops)", "for stop in self._stops[:1])")],
    },
    "stop_string": {
        "new": [("num_before - len(stop) + 1", "num_before"), ("num_before - len(stop) + 1", "0")],
        "first": [
            ("start + len(stop) < first_end", "start + len(stop) <= first_end"),
            ("start + len(stop) < first_end", "matched is None"),
        ],
        "cut": [("first_end - len(matched)", "first_end")],
        "examine": [("not examine or not piece", "not piece")],
    },
    "ngram_draft": {
        "index": [
            (
                "self._followers[tuple(token_ids[index - size : index])] =",
                "self._followers[tuple(token_ids[index - size : index - 1])] =",
            ),
            (
                "self._followers[tuple(token_ids[index - size : index])] = index",
                "self._followers.setdefault(tuple(token_ids[index - size : index]), index)",
            ),
        ],
        "start": [("if size <= index:", "if size < index:")],
        "calls": [
            ("range(self._num_indexed,", "range(self._num_indexed + 1,"),
            ("self._num_indexed = len(token_ids)", "pass"),
        ],
        "longest": [("reversed(self._sizes)", "self._sizes")],
        "repeat": [
            ("(followers * -(-limit // len(followers)))[:limit]", "followers"),
            ("-(-limit // len(followers))", "(limit // len(followers))"),
            (")[:limit]", ")"),
        ],
        "none": [("return []", "return token_ids[-limit:]")],
    },
    "match_prefix": {
        "chain": [("keys.append(key := found)", "keys.append(found)"), ("keys.append(key := found)", "keys = [key := found]")],
        "miss": [("break", "continue")],
        "last": [("max(len(token_ids) - 1, 0)", "len(token_ids)")],
        "salt": [("self.root(cache_salt)", "self.root(None)")],
    },
    "allocate": {
        "shared": [
            ("self.blocks.drop([shared])", "pass"),
            ("seq.num_computed_tokens // self.block_size, len(table)", "len(table), len(table)"),
        ],
        "copies": [
            ("copies.append((shared, table[index]))", "pass"),
            ("copies.append((shared, table[index]))", "copies.append((table[index], shared))"),
        ],
        "enough": [
            ("self.block_size < end", "self.block_size <= end"),
            ("seq.num_computed_tokens + num_new_tokens", "num_new_tokens"),
        ],
    },
    "cache_blocks": {
        "full": [("num_tokens // self.block_size", "-(-num_tokens // self.block_size)")],
        "new": [
            ("self.index.enter(full, seq.block_table[num_cached:num_full])", "[]"),
            ("further(seq.prefix_keys, seq.token_ids,", "further([], seq.token_ids[num_cached * self.block_size :],"),
            ("seq.block_table[num_cached:num_full]", "seq.block_table[: num_full - num_cached]"),
        ],
        "keys": [("seq.prefix_keys += [key for _, key in full]", "pass")],
        "salt": [("seq.cache_salt)", "None)")],
        "off": [
            ("if self.enable_prefix_caching and seq.is_answered else 0", ""),
            ("self.enable_prefix_caching and seq.is_answered", "seq.is_answered"),
            ("self.enable_prefix_caching and seq.is_answered", "self.enable_prefix_caching"),
        ],
    },
    "next_chunk": {
        "grid": [("grid - start % grid", "grid")],
        "end": [("seq.num_tokens - start", "seq.num_tokens"), ("min(seq.num_tokens - start, ", "max(1, ")],
        "start": [
            ("seq.num_tokens - start", "seq.num_tokens - seq.num_computed_tokens"),
        ],
    },
    "make_room": {
        "ask": [("while not", "if not")],
        "victim": [("self.choose_victim(self.running, seq)", "seq")],
        "preempt": [("self._preempt(victim)", "self.running.remove(victim)")],
        "drop": [
            ("selection.drop(victim)", "pass"),
            ("selection.drop(victim)", "selection.preempted.append(victim)"),
        ],
        "itself": [
            ("return False", "return True"),
            ("if victim is seq:", "if victim is seq and len(selection.preempted) > 1:"),
        ],
    },
    "continue_running": {
        "order": [
            ("self._left_to_schedule(selection)", "self._left_to_schedule(selection)[::-1]"),
            ("self._left_to_schedule(selection)", "self.running"),
        ],
        "gone": [("seq.status is not SequenceStatus.RUNNING", "False")],
        "one": [("num_new > 1 and ", "")],
        "budget": [("selection.budget < num_new", "selection.budget <= num_new")],
        "waits": [("selection.budget = 0", "pass")],
        "room": [("elif self._make_room(seq, num_new, selection):", "else:")],
    },
    "start": {
        "prefix": [("self._prefix_of(seq)", "Prefix()")],
        "chunk": [("self.next_chunk(seq, num_cached)", "self.next_chunk(seq, 0)")],
        "budget": [("num_new > 1 and ", ""), ("selection.budget < num_new", "selection.budget <= num_new")],
        "reserved": [("num_kept_free=selection.num_kept_free", "num_kept_free=0")],
        "false": [("return False", "return True"), ("return True", "return None")],
        "running": [
            ("SequenceStatus.RUNNING", "SequenceStatus.WAITING"),
            ("self.running.append(seq)", "self.running.insert(0, seq)"),
        ],
        "blocks": [("self.block_manager.start(seq, prefix)", "pass"), ("self._select(selection, seq, num_new)", "pass")],
        "counts": [
            ("seq.num_computed_tokens = num_cached", "seq.num_computed_tokens = 0"),
        ],
        "kept": [("selection.num_kept_free += self.num_reserved_blocks(seq) + len(seq.forks)", "pass")],
    },
    "pack": {
        "ids": [
            ("seq.token_ids[start:end]", "seq.token_ids[:end]"),
            ("input_ids += item.draft_token_ids", "pass"),
            ("start = seq.num_computed_tokens", "start = 0 if seq.num_new_tokens > 1 else seq.num_computed_tokens"),
        ],
        "positions": [
            ("positions += range(start, end + num_drafts)", "positions += [*range(start, end), *[end] * num_drafts]")
        ],
        "slots": [("% block_size for", "% (block_size + 1) for")],
        "queries": [
            ("[item.num_new_tokens] + [1] * num_drafts", "[item.num_new_tokens + num_drafts]"),
            ("sequences += [seq] * (num_drafts + 1)", "sequences += [seq]"),
        ],
        "lengths": [("range(end, end + num_drafts + 1)", "[end + num_drafts] * (num_drafts + 1)")],
        "unknown": [("or [0]", "or [1]"), (" or [0]", "")],
    },
    "rotary": {
        "pairs": [("chunk(2, dim=-1)", "view(*x.shape[:-1], -1, 2).unbind(-1)")],
        "angle": [("(-second, first)", "(second, first)"), ("(-second, first)", "(-first, second)")],
    },
    "causal_attention": {
        "mask": [
            ("tril(seq_len - num_tokens)", "tril()"),
            ("tril(seq_len - num_tokens)", "tril(seq_len - num_tokens + 1)"),
        ],
        "scale": [(" * head_dim**-0.5", "")],
        "heads": [("repeat_interleave(num_heads // num_kv_heads, dim=1)", "repeat(1, num_heads // num_kv_heads, 1)")],
        "dtype": [(".to(q.dtype)", ""), ("q.float(), k.float()", "q, k")],
        "large": [
            (
                'weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)',
                'weights = scores.masked_fill(~visible, float("-inf")).exp()\n    weights /= weights.sum(dim=-1, keepdim=True)',
            )
        ],
    },
    "paged_attention": {
        "write": [("cache.write(layer, metadata.slot_mapping, k, v)", "pass")],
        "layer": [("cache.write(layer,", "cache.write(0,"), ("cache.gather(layer,", "cache.gather(0,")],
        "queries": [("slice(starts[i], starts[i + 1])", "slice(starts[i + 1] - 1, starts[i + 1])")],
        "tables": [("metadata.block_tables[i]", "metadata.block_tables[0]")],
    },
    "temperature": {
        "divide": [("/ temperature", "* temperature"), ("temperature.unsqueeze(-1)", "temperature[0]")],
        "tiny": [("(logits - shift.unsqueeze(-1))", "logits"), (".amax(dim=-1))", ".amax().expand(len(logits)))")],
        "one": [("torch.where(temperature == 1.0, 0.0, logits.amax(dim=-1))", "logits.amax(dim=-1)")],
    },
    "min_p": {
        "limit": [
            ("ratio < ", "ratio <= "),
            ("ratio <", "ratio >"),
            ("integer_weights(logits).float() / ONE", "logits.softmax(-1)"),
        ],
        "rows": [("integer_weights(logits).float() / ONE", "(logits - logits.amax()).exp()")],
        "none": [("return logits\n", "return None\n")],
    },
    "top_p": {
        "before": [("before >= enough", "cumulative >= enough"), ("before >= enough", "before > enough")],
        "order": [("dropped.scatter(-1, ids, dropped)", "dropped"), ("descending=True", "descending=False")],
        "exact": [("weights = integer_weights(falling)", "weights = falling.softmax(-1).half()")],
        "off": [("& (top_p < 1.0).unsqueeze(-1)", "")],
        "total": [("cumulative[:, -1] if total is None else total", "cumulative[:, -1]")],
    },
    "repetition_penalty": {
        "sign": [
            ("torch.where(old > 0, old / penalty, old * penalty)", "old / penalty"),
            ("old > 0", "old < 0"),
            (
                "penalty = counts.read(logits), penalties[counts.rows]",
                "penalty = counts.read(logits), penalties[counts.rows] ** counts.values",
            ),
        ],
        "rows": [("penalties[counts.rows]", "penalties[0]")],
        "tiny": [
            (".clamp_(max=torch.finfo(logits.dtype).max)", ""),
            (".clamp_(max=torch.finfo(logits.dtype).max)", ".nan_to_num()"),
        ],
        "none": [("return logits\n", "return None\n"), ("counts is None or penalties is None", "counts is None")],
    },
    "token_mask": {
        "rows": [("logits[grammar.rows] = ", ""), ("len(grammar.rows) == len(logits)", "True")],
        "value": [('float("-inf")', "-1e9")],
        "none": [("return logits\n", "return None\n")],
    },
    "draw": {
        "first": [("right=True", "right=False")],
        "threshold": [
            ("thresholds(cumulative[:, -1], u)", "(u * cumulative[:, -1]).round().long()"),
            ("thresholds(cumulative[:, -1], u)", "(u * weights.shape[-1]).long()"),
        ],
        "exact": [("weights.cumsum(dim=-1)", "weights.float().cumsum(dim=-1).long()")],
    },
    "eight_bits": {
        "scale": [
            ("/ 127", "/ 128"),
            (".abs().amax(2)", ".amax(2)"),
            ("amax(2) / 127", "amax() / 127"),
        ],
        "round": [(".round()", ".floor()")],
        "layout": [(".flatten(1)", ""), ("dtype=torch.uint8", "dtype=torch.int32"), ("scales, 128,", "scales, 127,")],
        "zeros": [(".clamp(min=torch.finfo(torch.float32).tiny)", "")],
    },
}

# Correct versions that are not the engine's.
OTHERS = {
    "column_slice": [
        ("rank * total // size, (rank + 1) * total // size", "-(-rank * total // size), -(-(rank + 1) * total // size)"),
    ],
    "held_text": [
        (
            "    return 0",
            "    return max(n for n in range(len(self.text) + 1)"
            " if n == 0 or any(len(s) > n and self.text.endswith(s[:n]) for s in self._stops))",
        )
    ],
    "temperature": [
        (
            "torch.where(temperature == 1.0, 0.0, logits.amax(dim=-1))",
            "torch.where(temperature == 1.0, 0.0, logits.amax(dim=-1) - 3e-38)",
        )
    ],
    "min_p": [("integer_weights(logits).float() / ONE", "(logits - logits.amax(dim=-1, keepdim=True)).exp()")],
    "top_p": [("(before >= enough.unsqueeze(-1))", "(before >= enough.unsqueeze(-1)) & (before > 0)")],
    "eight_bits": [
        (
            ".clamp(min=torch.finfo(torch.float32).tiny)",
            "\n    integers = (groups / torch.where(scales == 0, 1.0, scales).unsqueeze(2)).round() + 128"
            "\n    return integers.to(torch.uint8).flatten(1), scales, torch.full_like(scales, 128, dtype=torch.uint8)",
        )
    ],
}


WITHOUT_TENSORS = [task.name for task in TRACK if task.cases_in in ("scheduling", "text")]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Call `nanoinfer learn` with these arguments inside a workbook."""
    assert CliRunner().invoke(app, ["learn", "start", str(tmp_path / "book")]).exit_code == 0
    monkeypatch.chdir(tmp_path / "book")
    return lambda *arguments, **given: CliRunner().invoke(app, ["learn", *arguments], **given)


def version_of(task, old="", new=""):
    """The engine's function with a piece of its source replaced."""
    source = task.function.source
    assert old in source, f"{task.name}: {old!r} is not in the source any more"
    namespace = {"Prefix": Prefix}
    exec(f"{task.function.imports}\n{source.replace(old, new)}", namespace)
    return namespace[task.function.name]


ALL = [(name, rule, *mutant) for name, rules in MUTANTS.items() for rule, mutants in rules.items() for mutant in mutants]


@pytest.mark.parametrize("task", TRACK, ids=NAMES)
def test_the_engines_own_version_passes_from_its_source(task):
    assert check(task, version_of(task)) is None


@pytest.mark.parametrize(("name", "rule", "old", "new"), ALL)
def test_a_plausible_mistake_is_found(name, rule, old, new):
    failure = check(find(name), version_of(find(name), old, new))
    assert failure is not None
    assert failure.expected != failure.got


@pytest.mark.parametrize(("name", "old", "new"), [(name, *other) for name, others in OTHERS.items() for other in others])
def test_a_correct_version_that_differs_is_accepted(name, old, new):
    assert check(find(name), version_of(find(name), old, new)) is None


def test_every_rule_of_a_task_stands_in_its_file_and_has_a_mutant():
    assert set(MUTANTS) == set(NAMES)
    for task in TRACK:
        assert list(MUTANTS[task.name]) == list(task.rules), task.name
        text = " ".join(task.text.split())
        assert [rule for rule in task.rules.values() if " ".join(rule.split()) not in text] == []


def test_what_the_engines_version_uses_stands_in_the_tasks_file():
    for task in TRACK:
        about = " ".join([ast.get_docstring(ast.parse(task.text)), task.function.header, *task.hints])
        (function,) = ast.parse(task.function.source).body
        for part in ast.walk(function):
            is_left_out = isinstance(part, ast.If) and any(name in ast.unparse(part.test) for name in FEATURES)
            if is_left_out or isinstance(part, ast.Assert):
                part.test, part.body = ast.Constant(True), []
        nodes = [node for part in function.body for node in ast.walk(part) if isinstance(node, ast.Attribute)]
        used = {node.attr for node in nodes if ast.unparse(node.value) != "self.observer"}
        assert used - set(re.findall(r"\w+", about)) - KNOWN == set(), task.name


def test_a_task_has_a_file_that_shows_no_solution_and_a_section_that_explains_it():
    for task in TRACK:
        function = ast.parse(task.text).body[-1]
        body = function.body[1:] if ast.get_docstring(function) else function.body
        assert [type(statement) for statement in body] == [ast.Raise], task.name
        names = {}
        exec(compile(task.text, task.name, "exec"), names)  # its imports exist
        assert ("torch" in names) == (task.name not in WITHOUT_TENSORS)
        lesson, _, section = task.notebook.partition("#")
        [notebook] = Path(__file__).parents[3].glob(f"notebooks/*_{lesson}.ipynb")
        assert f'"## {section}\\n"' in notebook.read_text(encoding="utf-8") or f'"## {section}"' in notebook.read_text(
            encoding="utf-8"
        )


def test_a_failing_case_shows_all_of_its_input():
    failure = str(check(find("rotary"), version_of(find("rotary"), "(-second, first)", "(second, first)")))
    assert [name in failure for name in ("x = float32 [1, 1, 2]", "cos = ", "sin = ")] == [True] * 3
    for name in NAMES:
        lines = str(check(find(name), lambda *args, **more: None)).splitlines()
        assert max(map(len, lines)) < 78, (name, lines)


def test_an_unwritten_workbook_fails_in_plain_words(run):
    result = run("check")
    assert result.exit_code == 1
    assert result.output.count("the function is not written yet") == len(TRACK)
    assert "Traceback" not in result.output
    assert run("list").output == run().output
    lines = run().output.splitlines()
    assert lines[1].startswith("  t01_argmax ")
    assert max(map(len, lines)) < 80


@pytest.mark.slow
def test_a_solved_workbook_passes_and_writes_the_engines_text(run):
    for name in NAMES:
        assert run("solve", name, "--yes").exit_code == 0
    assert run("check").exit_code == 0
    assert "It is your engine now" in run().output
    given = ["Once upon a time", "--seed", "3", "-n", "24"]
    written = run("run", *given).output
    text = CliRunner().invoke(app, ["generate", *given, "--echo", "--enforce-eager"]).output
    assert " ".join(written.split()).startswith(" ".join(text.split()))
    assert "Yours: argmax (" in written
    assert "causal_attention (" in written.split("Passed, but")[0]


def test_one_task_from_mistake_to_solution(run):
    book = Workbook.here(NAMES)
    text = book.file("argmax").read_text()
    book.file("argmax").write_text(text.replace("raise NotImplementedError  # your code", "return logits.argmax(-1)"))
    assert book.status("argmax") == "written"
    result = run("check", "argmax")
    assert (result.exit_code, "given     logits = float32 [1, 2]" in result.output) == (1, True)
    book.file("argmax").write_text(text.replace("raise NotImplementedError  # your code", "return oops"))
    assert re.search(r"got       NameError in line \d+: name 'oops' is not defined", run("check", "argmax").output)
    book.file("argmax").write_text("def argmax(:\n")
    assert "a SyntaxError in line 1" in run("check", "argmax").output
    book.file("argmax").unlink()
    assert "no file t01_argmax.py" in run("check", "argmax").output
    hints = find("argmax").hints
    assert [hints[0] in run("hint", "argmax").output, hints[1] in run("hint", "argmax").output] == [True, True]
    assert run("solve", "argmax", input="n\n").exit_code == 1
    assert run("solve", "argmax", input="y\n").exit_code == 0
    assert {run("check", name).output for name in ("1", "t01", "t01_argmax.py", "argmax")} == {"argmax: passed\n"}
    assert "largest.isfinite()" in book.file("argmax").read_text()
    book.file("argmax").write_text("def argmax(:\n")  # no function of which the beginning could be kept
    assert (run("solve", "argmax", "--yes").exit_code, run("check", "argmax").exit_code) == (0, 0)
    book.file("argmax").write_text(book.file("argmax").read_text() + "\n# changed\n")
    assert book.status("argmax") == "written"


def test_an_error_names_the_function_of_the_engine_that_raises_it(run):
    file = Workbook.here(NAMES).file("match_prefix")
    file.write_text(file.read_text().replace("raise NotImplementedError  # your code", "return list(self.in_blocks(5))"))
    output = " ".join(run("check", "match_prefix").output.split())
    assert re.search(r"got TypeError in line \d+, inside in_blocks: 'int' object is not iterable", output)


def test_a_function_that_does_not_end_is_stopped(run, monkeypatch):
    monkeypatch.setattr("nanoinfer_course.cli.SECONDS", 0.3)
    file = Workbook.here(NAMES).file("accept_drafts")
    file.write_text(file.read_text().replace("raise NotImplementedError  # your code", "while True: pass"))
    assert "no answer within 0.3 seconds: the function does not end (it was in line " in " ".join(
        run("check", "accept_drafts").output.split()
    )


EXITS = {
    "in the function": ("import sys; sys.exit(0)", ""),
    "by a generator's exit": ("raise GeneratorExit", ""),
    "at file level": ("return 0", "raise SystemExit"),
}


@pytest.mark.parametrize("place", EXITS)
def test_a_task_that_exits_has_not_passed(run, place):
    book, (body, end) = Workbook.here(NAMES), EXITS[place]
    book.replace_body("accept_drafts", find("accept_drafts").function.source)
    assert run("check", "accept_drafts").exit_code == 0
    file = book.file("accept_drafts")
    file.write_text(find("accept_drafts").text.replace("raise NotImplementedError  # your code", body) + f"\n\n{end}\n")
    result = run("check", "accept_drafts")
    assert (result.exit_code, book.status("accept_drafts")) == (1, "written")
    assert "accept_drafts: not yet\n" in result.output
    assert ("GeneratorExit" if "Generator" in body else "SystemExit in line") in result.output


ENDS = {
    "os._exit": "import os\nos._exit(0)",
    "another program": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', ''])",
    "at the process's exit": "import atexit, os\natexit.register(os._exit, 0)",
    "in a thread": "import os, threading, time\nthreading.Thread(target=os._exit, args=(0,)).start()\ntime.sleep(60)",
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the command runs in this process itself")
@pytest.mark.parametrize("way", ENDS)
def test_a_task_that_ends_the_process_has_not_passed(run, way):
    book = Workbook.here(NAMES)
    book.file("accept_drafts").write_text(f"{find('accept_drafts').text}\n\n{ENDS[way]}\n")
    command = [sys.executable, "-m", "nanoinfer", "learn", "check", "accept_drafts"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, book.status("accept_drafts")) == (1, "empty")
    says = (
        "accept_drafts: not yet" if "exit" in way[-4:] and "process" in way else "error: the workbook's code ended the process"
    )
    assert says in ended.stdout + ended.stderr


def test_every_command_that_runs_the_learners_code_has_a_child_process():
    commands = typer.main.get_group(learn.app).commands
    assert {name for name, command in commands.items() if isinstance(command, learn.ChildProcessCommand)} == {
        *("check", "watch", "run", "ladder", "speed")
    }


def test_a_workbook_of_windows_is_read_solved_and_exported(run):
    book = Workbook.here(NAMES)
    file, source = book.file("accept_drafts"), find("accept_drafts").function.source
    of_windows = b"\xef\xbb\xbf" + file.read_text().replace("\n", "\r\n").encode()
    file.write_bytes(of_windows)
    assert book.status("accept_drafts") == "empty"
    assert "the function is not written yet" in run("check", "accept_drafts").output
    assert run("solve", "accept_drafts", "--yes").exit_code == 0
    file.write_bytes(b"\xef\xbb\xbf" + file.read_text().replace("\n", "\r\n").encode())
    assert run("check", "accept_drafts").output == "accept_drafts: passed\n"
    assert Own.read(file, "num_accepted").source == source.strip()


def test_a_speed_task_that_exits_has_not_passed(run, monkeypatch):
    monkeypatch.setattr("nanoinfer_lab.bench.roofline.measure_bandwidth", lambda device: 1e9)
    Path("s05_drafts.py").write_text("raise SystemExit(0)\n")
    result = run("speed", "drafts")
    assert (result.exit_code, "SystemExit in line 1: 0" in result.output) == (1, True)


def test_installed_functions_are_called_and_taken_out_again(monkeypatch):
    from nanoinfer.attention import dense, reference

    later = ModuleType("nanoinfer_later")
    monkeypatch.setitem(sys.modules, later.__name__, later)
    task, calls_before = find("causal_attention"), dense.causal_attention
    with installed({task.function: lambda *args: "mine"}) as calls:
        assert reference.causal_attention() == dense.causal_attention() == "mine"
        assert task.function.original is calls_before
        later.causal_attention = dense.causal_attention  # as in a module that is imported now
    assert calls[task.function] == 2
    assert reference.causal_attention is dense.causal_attention is calls_before
    assert later.causal_attention is calls_before


def test_other_folders_and_names_are_refused(run, monkeypatch, tmp_path):
    for arguments in (("check", "argmix"), ("check", "25"), ("check", "0"), ("hint", "argmix"), ("start", ".")):
        result = run(*arguments)
        assert (result.exit_code, "Traceback" in result.output) == (1, False)
    monkeypatch.chdir(tmp_path)
    assert "nanoinfer learn start FOLDER" in run().output


def test_a_saved_file_is_checked_at_once(run, monkeypatch):
    book = Workbook.here(NAMES)

    def save(seconds):
        if book.status("accept_drafts") == "passed":
            raise KeyboardInterrupt
        book.replace_body("accept_drafts", find("accept_drafts").function.source)

    monkeypatch.setattr("nanoinfer_course.cli.time.sleep", save)
    output = run("watch").output
    assert "Next: t01_argmax.py\nSave a file" in output
    assert "accept_drafts: passed\n\n1 of 24 passed. Next: t01_argmax.py" in output


def test_tasks_without_tensors_need_no_torch(tmp_path):
    calls = [["start", "book"], [], *(["hint", name] for name in NAMES), *(["check", name] for name in WITHOUT_TENSORS)]
    code = f"""
import os, sys
from typer.testing import CliRunner
from nanoinfer_course import cli as learn
from nanoinfer.cli.main import app
for arguments in {calls}:
    result = CliRunner().invoke(app, ["learn", *arguments])
    assert result.exit_code == (arguments[:1] == ["check"]), result.output
    if arguments[:1] == ["start"]:
        os.chdir("book")
print([name for name in sys.modules if name in ("torch", "numpy", "transformers")])
"""
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path).stdout == "[]\n"
    )


@pytest.mark.long
def test_random_changes_of_the_solutions_are_found():
    assert mutate.main(200, seed=0) >= 0.95


def test_the_slow_functions_of_the_speed_tasks_are_right():
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator) for shape in ((2, 64), (9, 64)))
    torch.testing.assert_close(speed.batch(x, weight), x @ weight.T)
    rounded = quantize(weight, 8)
    torch.testing.assert_close(
        speed.int8_weights(x[:1], rounded.integers, rounded.scales), x[:1] @ weight.T, atol=0.1, rtol=0.1
    )
    work = speed.fused_draw_work(2)
    assert work.call(speed.fused_draw).tolist() == work.engine()[0].tolist()
    q, pages = torch.randn(1, 2, 8, generator=generator), torch.randn(2, 4, 2, 3, 8, generator=generator)
    keys, values = (one[[3, 1]].transpose(1, 2).flatten(0, 1)[:5] for one in pages)
    attended = speed.page_attention(q, *pages, torch.tensor([[3, 1]]), torch.tensor([5]))
    torch.testing.assert_close(attended, causal_attention(q, keys, values))


def test_a_speed_task_passes_if_it_is_right_and_fast(run, monkeypatch):
    shares = {"batch": (0.5, True), "page_attention": (0.1, True), "fused_draw": (0.9, False)}

    def grade(task, version, bandwidth):
        assert version.__code__.co_name == task.name
        share, is_right = shares.get(task.name, (0.9, True))
        return speed.Grade(share, 0.8, is_right)

    monkeypatch.setattr(speed, "grade", grade)
    monkeypatch.setattr("nanoinfer_lab.bench.roofline.measure_bandwidth", lambda device: 2e10)
    result = run("speed")  # code that nobody touched, on a machine where it is fast enough
    assert result.exit_code == 1
    assert (result.output.count("not changed yet"), "passed" in result.output) == (4, False)
    for file in Path().glob("s0*.py"):
        file.write_text(file.read_text() + "\nCHANGED = True\n")
    result = run("speed")
    verdicts = [line.split("speed, ")[1] for line in result.output.splitlines()[1:]]
    assert verdicts == ["passed", "not yet: 0.25 is wanted", "its result is wrong", "passed", "passed"]
    assert result.exit_code == 1
    assert Path("s01_batch.py").read_text().count("def batch(") == 1
    assert run("speed", "s04_int8_weights.py").exit_code == 0
    Path("s01_batch.py").write_text("def batch(:")
    assert "s01_batch           a SyntaxError in line 1" in run("speed", "batch").output


@pytest.mark.slow
def test_the_ladder_measures_the_learners_engine_beside_ours(run, monkeypatch):
    monkeypatch.setattr("nanoinfer_lab.bench.roofline.measure_bandwidth", lambda device: 2e10)
    monkeypatch.setattr(ladder, "WORKLOAD", replace(ladder.WORKLOAD, input_lens=(16,) * 2, output_lens=(4,) * 2))
    assert run("solve", "causal_attention", "--yes").exit_code == run("check", "causal_attention").exit_code == 0
    output = run("ladder").output
    assert [line.split("  ")[0] for line in output.splitlines()] == ["version", "your engine", "the same, ours", "compiled"]
