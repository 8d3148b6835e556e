"""Malicious and broken checkpoints: each is refused with one clear sentence, in little time and memory. A good one loads after.

The table is run in one process of its own: a checkpoint that hangs, or takes all memory, ends that process.
"""

import json
import logging
import os
import re
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoinfer import LLM, SamplingParams
from nanoinfer.errors import NanoinferError
from nanoinfer.loading.checkpoint import BUNDLED, MAX_JSON_BYTES
from tests.helpers import gguf_files
from tests.helpers.forked import run_function

GOOD = BUNDLED / "tiny-qwen3"
CHAT = [{"role": "user", "content": "Tell me a story about Lily " + "a" * 50}]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
DIGITS = "9" * 5000
HEAD, NORM = "lm_head.weight", "model.norm.weight"

Change = Callable[[Path], object]  # what it does to a good folder


def write(name: str, content: bytes | str) -> Change:
    content = content.encode() if isinstance(content, str) else content
    return lambda path: (path / name).unlink(missing_ok=True) or (path / name).write_bytes(content)


def edit(name: str, **changes) -> Change:
    return write(name, json.dumps(json.loads((GOOD / name).read_text()) | changes))


config, generation, tokenizer = (partial(edit, f"{name}.json") for name in ("config", "generation_config", "tokenizer"))
template = partial(write, "chat_template.jinja")


def rope(**changes) -> Change:
    return config(rope_parameters=YARN | changes)


def vocabulary(changes: dict[str, object]) -> Change:
    model = json.loads((GOOD / "tokenizer.json").read_text())["model"]
    return tokenizer(model=model | {"vocab": model["vocab"] | changes})


def old_vocabulary(content: str) -> Change:
    """In the format that came before tokenizer.json."""
    return lambda path: (without("tokenizer.json")(path), write("vocab.json", content)(path))


def regex(pattern: str) -> Change:
    pattern = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return tokenizer(pre_tokenizer=pattern)


def without(name: str) -> Change:
    return lambda path: (path / name).unlink()


def lacks(key: str, **changes) -> Change:
    content = json.loads((GOOD / "config.json").read_text()) | changes
    del content[key]
    return write("config.json", json.dumps(content))


def index(*names: object) -> Change:
    content = json.dumps({"weight_map": {str(i): name for i, name in enumerate(names)}})
    return lambda path: (without("model.safetensors")(path), write("model.safetensors.index.json", content)(path))


def header(content: dict | bytes) -> Change:
    content = content if isinstance(content, bytes) else json.dumps(content).encode()
    return write("model.safetensors", struct.pack("<Q", len(content)) + content)


def tensor(dtype: str, shape: list[int]) -> Change:
    return header({"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}})


def tensors(changes: dict[str, torch.Tensor | None], **config_changes) -> Change:
    def change(path: Path) -> None:
        merged = load_file(GOOD / "model.safetensors") | changes
        (path / "model.safetensors").unlink()
        save_file({name: tensor for name, tensor in merged.items() if tensor is not None}, path / "model.safetensors")
        config(**config_changes)(path)

    return change


def cut(end: int) -> Change:
    return write("model.safetensors", (GOOD / "model.safetensors").read_bytes()[:end])


def fifo(name: str) -> Change:
    return lambda path: ((path / name).unlink(missing_ok=True), os.mkfifo(path / name))


def link(name: str, target: str) -> Change:
    return lambda path: ((path / name).unlink(missing_ok=True), (path / name).symlink_to(target))


def sparse(name: str, size: int) -> Change:
    return lambda path: ((path / name).touch(), os.truncate(path / name, size))


def gguf(content: bytes | None = None, metadata: dict | None = None, tensors: dict | None = None, **counts: object) -> Change:
    """Leave one GGUF file of the folder: of these bytes, or a good header with these changes."""

    def change(path: Path) -> None:
        for file in path.iterdir():
            file.unlink()
        if content is not None:
            (path / "model.gguf").write_bytes(content)
        else:
            good = {"general.architecture": "qwen3", "general.alignment": 32}
            tensor = {"token_embd.weight": gguf_files.floats(torch.zeros(8, 32))}
            gguf_files.write(path / "model.gguf", good | (metadata or {}), tensor | (tensors or {}), **counts)

    return change


def gguf_sparse(path: Path) -> None:
    """A header of zeros: 2**27 keys of no letters, each a uint8 of 0."""
    gguf(b"GGUF" + struct.pack("<IQQ", 3, 0, 2**27))(path)
    os.truncate(path / "model.gguf", 2**32)


LOOP = "{% for i in range(99999) %}"
DOUBLED = "{% set n = namespace(x='ab') %}" + LOOP + "{% set n.x = n.x ~ n.x %}{% endfor %}"

# name -> (what is done to a good checkpoint, what the message must say)
CASES: dict[str, tuple[Change, str]] = {
    # config.json as a file
    "config: missing": (without("config.json"), "config.json does not exist"),
    "config: truncated": (write("config.json", '{"a": '), "is not valid JSON"),
    "config: binary": (write("config.json", b"\x80\x02\xff"), "is not valid JSON"),
    "config: deep lists": (write("config.json", "[" * 10**6), "nested too deeply"),
    "config: 5,000 digits": (write("config.json", f'{{"vocab_size": {DIGITS}}}'), r"not valid JSON \(Exceeds the limit"),
    "config: 5 MB": (write("config.json", " " * (MAX_JSON_BYTES + 1)), "at most 4194304 are read"),
    "config: pipe": (fifo("config.json"), "config.json cannot be read: it is not a regular file"),
    "config: a link to itself": (link("config.json", "config.json"), "Too many levels of symbolic links"),
    "generation: a list": (write("generation_config.json", "[]"), "must hold a JSON object"),
    # architecture
    "model_type: of another family": (config(model_type="qwen2"), "model_type .* must be .qwen3. for .*, got .qwen2."),
    "architectures: lists": (config(architectures=[["Qwen3ForCausalLM"]]), r"\[\['Qwen3ForCausalLM'\]\] are not supported"),
    "model_type: missing": (lacks("model_type"), "no 'model_type'"),
    "quantization_config": (config(quantization_config={"quant_method": ["x"] * 9999}), "checkpoints quantised with"),
    "quantization_config: bits": (config(quantization_config={"quant_method": "gptq", "bits": 10**9}), "bits=1000000000"),
    "quantization_config: block": (
        config(quantization_config={"quant_method": "fp8", "weight_block_size": [0, "a"]}),
        r"weight_block_size=\[0, 'a'\]",
    ),
    "dtype: float8": (config(dtype="float8_e4m3fn"), "the checkpoint's dtype is 'float8_e4m3fn'; .* Pass dtype="),
    "dtype: long": (config(dtype="x" * 9999), "dtype is 'x"),
    # sizes
    "layers: 2^31 - 1": (config(num_hidden_layers=2**31 - 1), "num_hidden_layers .* must be a number >= 1 and <= 65536"),
    "layers: 10,000": (config(num_hidden_layers=10**4), "num_hidden_layers .* is 10000, but the weights"),
    "layers: one more": (config(num_hidden_layers=4), "missing: layers.3.input_layernorm"),
    "layers: one less": (config(num_hidden_layers=2), "unexpected: model.layers.2"),
    "layers: a fraction": (config(num_hidden_layers=3.0), "got 3.0"),
    "layers: true": (config(num_hidden_layers=True), "got True"),
    "head_dim: 10^9": (config(head_dim=10**9), "head_dim .* is 1000000000, but the weights have only"),
    "hidden_size: int64": (config(hidden_size=2**63), "hidden_size .* below 2..31, got 9223372036854775808"),
    "hidden_size: 10^9": (config(hidden_size=10**9), "the weights have only"),
    "hidden_size: missing": (lacks("hidden_size"), "no 'hidden_size'"),
    "vocab_size: one more": (config(vocab_size=1960), "misshaped: lm_head.weight"),
    "heads: 0": (config(num_attention_heads=0), "num_attention_heads .* >= 1"),
    "kv heads: 5": (config(num_key_value_heads=5), "must be a multiple of num_key_value_heads"),
    "positions: 10^30": (config(max_position_embeddings=10**30), "max_position_embeddings .* below 2..31"),
    "positions: before YaRN": (
        config(max_position_embeddings=-5, rope_parameters=YARN),
        "max_position_embeddings must be a number >= 1, got -5; download it again",
    ),
    "eps: NaN": (config(rms_norm_eps=float("nan")), "rms_norm_eps .* finite number, got nan"),
    "eps: a string": (config(rms_norm_eps="x"), "rms_norm_eps .* finite number"),
    "eps: negative": (config(rms_norm_eps=-1), "rms_norm_eps in .*config.json must be in 0 .. 1, got -1; download it again"),
    "tied: float8": (tensors({HEAD: torch.zeros(1959, 128).to(torch.float8_e4m3fn)}, tie_word_embeddings=True), "not a float"),
    "tied: a string": (config(tie_word_embeddings="false"), "tie_word_embeddings .* true or false, got 'false'"),
    "layer_types: a number": (config(layer_types=5), "wrong type"),
    "layer_types: lists": (config(layer_types=[[]]), "sliding-window"),
    "GPT-2: no keys": (lacks("hidden_size", architectures=["GPT2LMHeadModel"], model_type="gpt2"), "no 'n_embd'"),
    "GPT-2: 0 heads": (config(architectures=["GPT2LMHeadModel"], model_type="gpt2", num_attention_heads=0), "modulo by zero"),
    # RoPE
    "rope: a string": (config(rope_parameters="x"), "wrong type"),
    "rope: type list": (rope(rope_type=["yarn"]), "rope_type must be one of"),
    "rope: theta 10^400": (rope(rope_theta=10**400), "too large"),
    "rope: theta 1": (rope(rope_theta=1), "theta must be in 1.001"),
    "rope: factor 10^24": (rope(factor=10**24), "factor must be in"),
    "rope: context 10^24": (rope(original_max_position_embeddings=10**24), "original_max_position_embeddings must be in"),
    "rope: beta 1e-320": (rope(beta_fast=1e-320), "beta_fast must be in"),
    "rope: beta < 0": (rope(beta_slow=-1), "beta_slow must be in"),
    "rope: context a list": (rope(original_max_position_embeddings=[1]), "wrong type"),
    "rope: betas": (rope(beta_fast=1, beta_slow=2), "beta_fast must be in 2 .. 1e.06, got 1"),
    "rope: no factor": (config(rope_parameters={"rope_type": "yarn"}), "has no 'factor'"),
    "rope: by layer": (config(rope_parameters={"full_attention": YARN}), "one rope_type for all layers"),
    "rope: two types": (rope(type="linear"), "one rope_type for all layers"),
    "rope: two forms": (
        config(rope_parameters=YARN, rope_scaling=YARN | {"factor": 2.0}),
        "rope_parameters and rope_scaling must be equal where config.json has both, got .*; remove the wrong one",
    ),
    "rope: attention_factor": (rope(attention_factor=float("nan")), "attention_factor must be in"),
    "rope: mscale": (rope(mscale=1e308, mscale_all_dim=-1e308), "attention_factor must be in"),
    "rope: truncate": (rope(truncate="no"), "truncate must be true or false"),
    # EOS ids and defaults
    "eos: a string": (generation(eos_token_id="</s>"), "must be an id or a list of ids"),
    "default top_p": (generation(top_p=float("nan")), "generation_config.json: top_p"),
    "default max_new_tokens": (generation(max_new_tokens=10**4000), "generation_config.json: max_tokens must be below"),
    "default stop_strings": (generation(stop_strings=5), "generation_config.json: stop must be a string or a list of strings"),
    "default bad_words_ids": (generation(bad_words_ids=[[10**6]]), "generation_config.json: bad_words has the token id 1"),
    "do_sample": (generation(do_sample="no"), "generation_config.json: do_sample must be true or false, got 'no'"),
    # the index
    "index: ../x": (index("../x"), "names ../x, outside its folder"),
    "index: absolute": (index("/etc/passwd"), "names /etc/passwd, outside its folder"),
    "index: long name": (index("x" * 5000), "not in the folder"),
    "index: a NUL": (index("a\0b"), "not in the folder"),
    "index: 10,000 files": (index(*(f"f{i}" for i in range(10**4))), "and 9990 more, not in the folder"),
    "index: numbers": (index(5), "no weight_map of file names"),
    "index: a pipe": (lambda path: (index("x.safetensors")(path), fifo("x.safetensors")(path)), "x.safetensors cannot be read"),
    # weights
    "weights: missing": (without("model.safetensors"), "holds no *.safetensors".replace("*", r"\*")),
    # GGUF
    "gguf: truncated": (gguf(b"GGUF"), r"model.gguf is truncated or corrupted \(4 bytes at 4, beyond the end of the file"),
    "gguf: pickle": (gguf(b"\x80\x02}q\x00." * 99), "is not a GGUF file"),
    "gguf: big-endian": (gguf(b"GGUF" + struct.pack(">IQQ", 3, 1, 1)), "big-endian GGUF file"),
    "gguf: version 1": (gguf(version=1), "version 1 of GGUF; 2 and 3 are"),
    "gguf: 2^63 tensors": (gguf(num_tensors=2**63), "claims 9223372036854775808 tensors"),
    "gguf: a tensor too many": (gguf(num_tensors=2), "has 0 axes"),
    "gguf: a key too many": (gguf(num_keys=3), "truncated or corrupted|has .* axes"),
    "gguf: sparse": (gguf_sparse, "claims .* 134217728 keys"),
    "gguf: a string of 2^62": (gguf(metadata={"a": struct.pack("<IQ", 8, 2**62)}), "beyond the end of the file"),
    "gguf: 10^9 strings": (gguf(metadata={"a": struct.pack("<IIQ", 9, 8, 10**9)}), "an array of 1000000000 values"),
    "gguf: empty strings": (gguf(metadata={"a": struct.pack("<IIQ", 9, 8, 2**17) + bytes(2**20)}), "no 'head|no '|wrong type"),
    "gguf: type 13": (gguf(metadata={"a": struct.pack("<I", 13)}), "a value of type 13"),
    "gguf: alignment 0": (gguf(metadata={"general.alignment": 0}), "general.alignment .* power of two >= 8, got 0"),
    "gguf: architecture": (gguf(metadata={"general.architecture": "../../x\n"}), r"architecture '\.\./\.\./x.n'"),
    "gguf: offset beyond": (gguf(tensors={"x": (0, (8,), bytes(32), 2**62)}), "is truncated: it has .* bytes, and 'x' ends"),
    "gguf: not aligned": (gguf(tensors={"x": (0, (8,), bytes(32), 4)}), "'x' in .* not whole blocks"),
    "gguf: overlap": (gguf(tensors={"x": (0, (8,), bytes(32), 0)}), "tensors in .* overlap"),
    "gguf: shape of 2^128": (gguf(tensors={"x": (0, (2**63, 2**63), b"")}), "is truncated: .* 'x' ends"),
    "gguf: no elements": (gguf(tensors={"x": (0, (0, 2**63), b"")}), "'x' in .* not whole blocks"),
    "gguf: 2^32 axes": (gguf(tensors={"x": (0, (1,) * 5, bytes(4))}), "has 5 axes"),
    "gguf: a path": (gguf(tensors={"../../x\n": (10, (256,), bytes(84))}), r"'\.\./\.\./x.n' in .* has the type Q2_K"),
    "gguf: no sizes": (gguf(), "has no 'num_attention_heads', which this architecture needs"),
    "weights: pipe": (fifo("model.safetensors"), "it is not a regular file"),
    "weights: no target": (link("model.safetensors", "/no/such"), "does not exist"),
    "weights: empty": (write("model.safetensors", b""), "truncated or corrupted"),
    "weights: header of 2^63": (write("model.safetensors", struct.pack("<Q", 2**63)), "a header of 9223372036854775808 bytes"),
    "weights: header of 20 MB": (header(b"{" * 20 * 2**20), "a header of 20971520 bytes"),
    "weights: deep header": (header(b"[" * 10**5), "corrupted"),
    "weights: negative shape": (tensor("F32", [-1]), "corrupted"),
    "weights: shape overflows": (tensor("F32", [2**62, 2**62]), "corrupted"),
    "weights: no elements": (tensor("F32", [0, 2**62]), "the weights are 1 tensors"),
    "weights: unknown dtype": (tensor("F3", [0]), "corrupted"),
    "weights: a line break": (tensors({"a\nb" * 999: torch.zeros(1)}), r"unexpected: a\\nb"),
    "weights: 5,000 more": (tensors({f"x{i}": torch.zeros(1) for i in range(5000)}), "(?s)unexpected: x.*and 4990 more"),
    "weights: integers": (
        tensors({NORM: torch.zeros(128, dtype=torch.int8)}),
        "not a float: model.norm.weight is I8, and config.json names no quantisation",
    ),
    "weights: cut short": (cut(-1), "model.safetensors is truncated or corrupted .*; download it again"),
    "weights: half": (cut(5000), "model.safetensors is truncated or corrupted"),
    "weights: a scalar": (tensors({NORM: torch.zeros(())}), r"model.norm.weight has shape \[\]"),
    # the tokenizer
    "tokenizer: empty": (write("tokenizer.json", ""), "cannot load the tokenizer"),
    "tokenizer: nothing in it": (write("tokenizer.json", "{}"), r"the tokenizer .*Model missing.*\); download it again"),
    "tokenizer: 5,000 digits": (write("tokenizer.json", f'{{"version": {DIGITS}}}'), "cannot load the tokenizer"),
    "tokenizer: pipe": (fifo("tokenizer.json"), "tokenizer.json cannot be read"),
    "tokenizer: 128 MB": (sparse("tokenizer.4.0.json", 2**27), "at most 67108864 are read"),
    "tokenizer: model": (tokenizer(model=5), "cannot load the tokenizer"),
    "tokenizer: an id of 2^40": (vocabulary({"zz": 2**40}), "the token 'zz' the id 1099511627776; ids are from 0 to 4194303"),
    "tokenizer: a negative id": (vocabulary({"zz": -1}), "the token 'zz' the id -1; ids are"),
    "tokenizer: equal ids": (vocabulary({str(i): 500 for i in range(50)}), "the tokens .* and .* the same id 500"),
    "vocab.json: equal ids": (old_vocabulary('{"a": 0, "b": 0}'), "the tokens 'a' and 'b' the same id 0"),
    "tokenizer: bad regex": (regex("("), "cannot load the tokenizer"),
    "tokenizer: regex that explodes": (regex("(a+a+)+c"), "the tokenizer fails on the text .*retry-limit"),
    "tokenizer_config: deep": (write("tokenizer_config.json", "[" * 10**5), "cannot load the tokenizer"),
    "tokenizer_config: bos": (edit("tokenizer_config.json", bos_token=5), "cannot load the tokenizer"),
    "added_tokens: a list": (write("added_tokens.json", "[1]"), "cannot load the tokenizer"),
    "special_tokens_map: pipe": (fifo("special_tokens_map.json"), "special_tokens_map.json cannot be read"),
    # the chat template
    "template: pipe": (fifo("chat_template.jinja"), "chat_template.jinja cannot be read"),
    "template: binary": (write("chat_template.jinja", b"\xff\xfe"), "cannot load the tokenizer"),
    "template: no Jinja": (template("{% for %}"), "the chat template refused the messages"),
    "template: refuses": (template("{{ raise_exception('a\nb' * 999) }}"), "refused the messages: a"),
    "template: recursion": (template("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), "maximum recursion depth"),
    "template: one operation": (template("{{ 9 ** (9 ** 9) }}"), "was stopped|takes more than|was killed, 2 times"),
    "template: a long string": (template("{{ 'a' * 10**10 }}"), "takes more than 256 MiB"),
    "template: doubles": (template(DOUBLED), "takes more than 256 MiB"),
    "template: long output": (template("{% for i in range(9999) %}{{ 'a' * 999 }}{% endfor %}"), "more than 8388608"),
    "template: leaves the sandbox": (template("{{ ''.__class__.__mro__ }}"), "refused the messages: access to attribute"),
}  # fmt: skip


def good_copy(folder: Path) -> Path:
    """A good checkpoint as the hub's cache holds it: symbolic links to files elsewhere."""
    folder.mkdir(parents=True)
    for file in GOOD.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def answer(path: Path) -> str:
    llm = LLM(path, kv_cache_memory=2**22, enforce_eager=True, seed=0)
    default = llm.get_default_sampling_params()
    [output] = llm.chat(CHAT, SamplingParams(max_tokens=2, temperature=default.temperature), use_tqdm=False)
    return output.outputs[0].text


def run_table(folder: Path) -> None:
    """Print {name: the error's class, its message, seconds of this process}."""
    logging.disable()
    signal.alarm(600)  # what hangs ends this process
    results = {}
    expected = answer(good_copy(folder / "good"))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number, (name, (change, _)) in enumerate(CASES.items()):
        path = good_copy(folder / str(number))
        change(path)
        cpu = time.process_time()
        try:
            answer(path)
            error, message = "", ""
        except NanoinferError as raised:
            error, message = "NanoinferError", str(raised)
        except BaseException as raised:
            error, message = type(raised).__name__, str(raised)
        results[name] = [error, message, time.process_time() - cpu]
    results["memory"] = [(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * 1024]
    results["good"] = [answer(folder / "good") == expected]
    print("\n" + json.dumps(results))


def problem(name: str, error: str, message: str, cpu_seconds: float) -> str | None:
    """What is wrong with a refusal."""
    if error != "NanoinferError":
        return f"{error or 'accepted'}: {message}"
    if not re.search(CASES[name][1], message):
        return f"other words: {message}"
    if not message.isprintable() or len(message) > 1500:
        return f"no clear sentence: {message}"
    if cpu_seconds > 60:  # what reads all of a broken file takes minutes
        return f"{cpu_seconds:.1f} s of CPU"
    return None


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="pipes, /dev/zero and a limit of memory")
def test_broken_checkpoints_are_refused_with_a_clear_sentence_quickly_in_little_memory_and_a_good_one_loads_after(tmp_path):
    assert len(CASES) > 100
    child = run_function(run_table, tmp_path)
    assert child.returncode == 0, child.stderr[-3000:]
    results = json.loads(child.stdout.splitlines()[-1])
    assert results.pop("good") == [True]
    assert results.pop("memory")[0] < 500e6
    assert {name: found for name, result in results.items() if (found := problem(name, *result))} == {}
