"""The learner's track: the engine's own functions pass, plausible wrong ones do not, and the commands keep their promises."""

import ast
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from nanoinfer.cli.main import app
from nanoinfer.lab.learn.check import check
from nanoinfer.lab.learn.track import NAMES, TRACK, find
from nanoinfer.lab.learn.workbook import Workbook, installed

# What replaces what in the engine's source: mistakes that a learner makes.
MUTANTS = {
    "rotary": [
        ("(-second, first)", "(second, first)"),
        ("(-second, first)", "(-first, second)"),
        ("chunk(2, dim=-1)", "view(*x.shape[:-1], -1, 2).unbind(-1)"),
    ],
    "causal_attention": [
        ("tril(seq_len - num_tokens)", "tril()"),
        (" * head_dim**-0.5", ""),
        ("repeat_interleave(num_heads // num_kv_heads, dim=1)", "repeat(1, num_heads // num_kv_heads, 1)"),
        ("tril(seq_len - num_tokens)", "tril(seq_len - num_tokens + 1)"),
        (".to(q.dtype)", ""),
        (" - window + 1)", " - window)"),
        ("if sinks is not None:", "if False:"),
    ],
    "pack": [
        ("% block_size for", "% (block_size + 1) for"),
        ("[item.num_new_tokens] + [1] * num_drafts", "[item.num_new_tokens + num_drafts]"),
        ("range(end, end + num_drafts + 1)", "[end + num_drafts] * (num_drafts + 1)"),
        ("input_ids.append(0)", "input_ids.append(1)"),
        ("start = seq.num_computed_tokens", "start = 0 if seq.num_new_tokens > 1 else seq.num_computed_tokens"),
    ],
    "match_prefix": [
        ("max(len(token_ids) - 1, 0)", "len(token_ids)"),
        ("keys.append(key := found)", "keys.append(found)"),
        ("break", "continue"),
        ("keys.append(key := found)", "keys = [key := found]"),
        ("self.root(cache_salt)", "self.root(None)"),
    ],
    "allocate": [
        ("self.blocks.drop([shared])", "pass"),
        ("copies.append((shared, table[index]))", "pass"),
        ("self.block_size < end", "self.block_size <= end"),
        ("seq.num_computed_tokens + num_new_tokens", "num_new_tokens"),
        ("(shared, table[index])", "(table[index], shared)"),
    ],
    "cache_blocks": [
        ("self.index.enter(full, group, table[num_cached:num_full])", "table[num_cached:num_full]"),
        ("num_tokens // self.block_size", "-(-num_tokens // self.block_size)"),
        ("further(seq.prefix_keys, seq.token_ids,", "further([], seq.token_ids[num_cached * self.block_size :],"),
        ("seq.cache_salt)", "None)"),
        ("seq.prefix_keys += [key for _, key in full]", "pass"),
        ("table[num_cached:num_full]", "table[: num_full - num_cached]"),
        ("if self.enable_prefix_caching and seq.reader is None else 0", ""),
    ],
    "paged_attention": [
        ("cache.write(layer, metadata.slot_mapping, k, v)", "pass"),
        ("metadata.block_tables[i, skipped:]", "metadata.block_tables[0, skipped:]"),
        ("keys, values, window, sinks)", "keys, values)"),
        ("cache.write(layer,", "cache.write(0,"),
        ("slice(starts[i], starts[i + 1])", "slice(starts[i + 1] - 1, starts[i + 1])"),
    ],
    "next_chunk": [
        ("grid - start % grid", "grid"),
        ("seq.num_tokens - start", "seq.num_tokens"),
        ("seq.num_computed_tokens if num_computed_tokens is None else num_computed_tokens", "seq.num_computed_tokens"),
        ("if num_computed_tokens is None", "if not num_computed_tokens"),
    ],
    "make_room": [
        ("self.running.remove(victim)", "self.running.pop(0)"),
        ("selection.drop(victim)", "pass"),
        ("selection.drop(victim)", "selection.preempted.append(victim)"),
        ("return False", "return True"),
        ("while not", "if not"),
        ("if victim is seq:", "if victim is seq and len(selection.preempted) > 1:"),
        ("self._preempt(victim)", "self._free(victim)"),
    ],
    "continue_running": [
        ("selection.budget = 0", "pass"),
        ("num_new > 1 and ", ""),
        ("seq.num_tokens >= seq.max_num_tokens", "False"),
        ("list(self.running)", "list(reversed(self.running))"),
        ("selection.budget < num_new", "selection.budget <= num_new"),
    ],
    "start": [
        ("num_kept_free=num_reserved", "num_kept_free=0"),
        ("seq.num_computed_tokens = num_cached", "seq.num_computed_tokens = 0"),
        ("num_new > 1 and ", ""),
        ("SequenceStatus.RUNNING", "SequenceStatus.WAITING"),
        ("self.running.append(seq)", "self.running.insert(0, seq)"),
        ("self.next_chunk(seq, num_cached)", "self.next_chunk(seq, 0)"),
        ("if seq.num_preemptions == 0:", "if True:"),
    ],
    "argmax": [
        ("torch.where(largest.isfinite(), token_ids, -1)", "token_ids"),
        ("logits.max(dim=-1)", "logits.flip(-1).max(dim=-1)"),
        ("largest.isfinite()", "~largest.isneginf()"),
    ],
    "temperature": [
        ("(logits - shift.unsqueeze(-1))", "logits"),
        ("torch.where(temperature == 1.0, 0.0, logits.amax(dim=-1))", "logits.amax(dim=-1)"),
        ("/ temperature", "* temperature"),
        (".amax(dim=-1))", ".amax().expand(len(logits)))"),
    ],
    "min_p": [
        ("ratio < ", "ratio <= "),
        ("integer_weights(logits).float() / ONE", "logits.softmax(-1)"),
        ("integer_weights(logits).float() / ONE", "(logits - logits.amax()).exp()"),
        ("ratio <", "ratio >"),
    ],
    "top_p": [
        ("before >= enough", "cumulative >= enough"),
        ("before >= enough", "before > enough"),
        ("& (top_p < 1.0).unsqueeze(-1)", ""),
        ("cumulative[:, -1] if total is None else total", "cumulative[:, -1]"),
        ("dropped.scatter(-1, ids, dropped)", "dropped"),
    ],
    "repetition_penalty": [
        ("torch.where(old > 0, old / penalty, old * penalty)", "old / penalty"),
        ("penalties[counts.rows]", "penalties[0]"),
        (".clamp_(max=torch.finfo(logits.dtype).max)", ""),
        ("old > 0", "old < 0"),
    ],
    "draw": [
        ("right=True", "right=False"),
        ("weights.cumsum(dim=-1)", "weights.float().cumsum(dim=-1).long()"),
        ("thresholds(cumulative[:, -1], u)", "(u * cumulative[:, -1]).round().long()"),
    ],
    "held_text": [
        (
            "held = max(held, len(self.text) - start) if start >= 0 else held",
            "held = len(self.text) - start if start >= 0 else held",
        ),
        ("len(self.text) - len(stop) + 1", "len(self.text) - 1"),
        ("len(self.text) - len(stop) + 1", "len(self.text) - len(stop)"),
        ("start = self.text.find(stop[0], start + 1)", "start = -1"),
    ],
    "stop_string": [
        ("num_before - len(stop) + 1", "num_before"),
        ("start + len(stop) < first_end", "start + len(stop) <= first_end"),
        ("start + len(stop) < first_end", "matched is None"),
        ("not examine or not piece", "not piece"),
        ("first_end if self._include_in_output else first_end - len(matched)", "first_end - len(matched)"),
        ("num_before - len(stop) + 1", "0"),
    ],
    "accept_drafts": [
        ("sampled_token_ids[num]", "sampled_token_ids[num + 1]"),
        ("num < len(self.draft_token_ids) and ", "num < len(self.draft_token_ids) - 1 and "),
        ("return num", "return sum(a == b for a, b in zip(self.draft_token_ids, sampled_token_ids))"),
    ],
    "ngram_draft": [
        ("reversed(self._sizes)", "self._sizes"),
        ("range(self._num_indexed,", "range(self._num_indexed + 1,"),
        ("(followers * -(-limit // len(followers)))[:limit]", "followers"),
        ("-(-limit // len(followers))", "(limit // len(followers))"),
        ("if size <= index:", "if size < index:"),
        (
            "self._followers[tuple(token_ids[index - size : index])] =",
            "self._followers[tuple(token_ids[index - size : index - 1])] =",
        ),
    ],
    "token_mask": [
        ("logits[grammar.rows] = ", ""),
        ("len(grammar.rows) == len(logits)", "True"),
        ('float("-inf")', "-1e9"),
    ],
    "eight_bits": [
        ("/ 127", "/ 128"),
        (".clamp(min=torch.finfo(torch.float32).tiny)", ""),
        (".round()", ".floor()"),
        (".abs().amax(2)", ".amax(2)"),
        ("amax(2) / 127", "amax() / 127"),
    ],
    "column_slice": [
        ("(rank + 1) * total // size", "rank * total // size + total // size"),
        ("rank * total // size, ", "rank * (total // size), "),
        ("(rank + 1) * total // size", "min((rank + 1) * -(-total // size), total)"),
    ],
}


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
    namespace = dict(vars(sys.modules[task.function.module]))
    exec(source.replace(old, new), namespace)
    return namespace[task.function.name]


@pytest.mark.parametrize("task", TRACK, ids=NAMES)
def test_the_engines_own_version_passes_from_its_source(task):
    assert check(task, version_of(task)) is None


@pytest.mark.parametrize(("name", "old", "new"), [(name, *mutant) for name, mutants in MUTANTS.items() for mutant in mutants])
def test_a_plausible_mistake_is_found(name, old, new):
    failure = check(find(name), version_of(find(name), old, new))
    assert failure is not None
    assert failure.expected != failure.got


def test_every_task_has_three_mutants_and_a_file_that_shows_no_solution():
    assert {name for name, mutants in MUTANTS.items() if len(mutants) >= 3} == set(NAMES)
    for task in TRACK:
        function = ast.parse(task.text).body[-1]
        body = function.body[1:] if ast.get_docstring(function) else function.body
        assert [type(statement) for statement in body] == [ast.Raise], task.name
        exec(compile(task.text, task.name, "exec"), {})  # its imports exist


def test_an_unwritten_workbook_fails_in_plain_words(run):
    result = run("check")
    assert result.exit_code == 1
    assert result.output.count("the function is not written yet") == len(TRACK)
    assert "Traceback" not in result.output
    assert run().output.splitlines()[0].startswith("t01_rotary.py")


@pytest.mark.slow
def test_a_solved_workbook_passes_and_writes_the_engines_text(run):
    for name in NAMES:
        assert run("solve", name, "--yes").exit_code == 0
    assert run("check").exit_code == 0
    assert f"{len(TRACK)} of {len(TRACK)} passed" in run().output
    written = run("run", "Once upon a time", "--seed", "3", "-n", "24").output
    text = CliRunner().invoke(app, ["generate", "Once upon a time", "--echo", "--seed", "3", "-n", "24"]).output
    assert written.startswith(text.strip())
    assert "Yours: rotary (" in written
    assert "causal_attention (" in written.split("Passed, but")[0]


def test_one_task_from_mistake_to_solution(run):
    book = Workbook.here(NAMES)
    text = book.file("argmax").read_text()
    book.file("argmax").write_text(text.replace("raise NotImplementedError  # your code", "return logits.argmax(-1)"))
    assert book.status("argmax") == "written"
    result = run("check", "argmax")
    assert (result.exit_code, "given     logits [[" in result.output) == (1, True)
    book.file("argmax").write_text(text.replace("raise NotImplementedError  # your code", "return oops"))
    assert re.search(r"got       NameError in line 1\d: name 'oops' is not defined", run("check", "argmax").output)
    book.file("argmax").write_text("def argmax(:\n")
    assert "a SyntaxError in line 1" in run("check", "argmax").output
    book.file("argmax").unlink()
    assert "no file t12_argmax.py" in run("check", "argmax").output
    book.file("argmax").write_text(find("argmax").text)
    hints = find("argmax").hints
    assert [hints[0] in run("hint", "argmax").output, hints[1] in run("hint", "argmax").output] == [True, True]
    assert run("solve", "argmax", input="n\n").exit_code == 1
    assert run("solve", "argmax", input="y\n").exit_code == 0
    assert run("check", "argmax").output == "argmax: passed\n"
    assert "largest.isfinite()" in book.file("argmax").read_text()
    book.file("argmax").write_text(book.file("argmax").read_text() + "\n# changed\n")
    assert book.status("argmax") == "written"


@pytest.mark.slow
def test_a_function_that_does_not_end_is_stopped(run, monkeypatch):
    monkeypatch.setattr("nanoinfer.lab.learn.check.SECONDS", 1)
    file = Workbook.here(NAMES).file("accept_drafts")
    file.write_text(file.read_text().replace("raise NotImplementedError  # your code", "while True: pass"))
    assert "no answer within 1 seconds: the function does not end (it was in line " in run("check", "accept_drafts").output


def test_installed_functions_are_called_and_taken_out_again():
    from nanoinfer.attention import dense, reference

    task, calls_before = find("causal_attention"), dense.causal_attention
    with installed({task.function: lambda *args: "mine"}) as calls:
        assert reference.causal_attention() == dense.causal_attention() == "mine"
        assert task.function.original is calls_before
    assert calls[task.function] == 2
    assert reference.causal_attention is dense.causal_attention is calls_before


def test_other_folders_and_names_are_refused(run, monkeypatch, tmp_path):
    for arguments in (("check", "argmix"), ("hint", "argmix"), ("start", ".")):
        result = run(*arguments)
        assert (result.exit_code, "Traceback" in result.output) == (1, False)
    monkeypatch.chdir(tmp_path)
    assert "nanoinfer learn start FOLDER" in run().output


@pytest.mark.slow
def test_generating_imports_nothing_of_it():
    code = "import nanoinfer.llm, sys; print([name for name in sys.modules if name.startswith('nanoinfer.lab.learn')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
