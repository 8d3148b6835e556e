"""llama.cpp, for worker.py: every step decodes all sequences in one batch, and samples with llama.cpp's samplers.

GPT-2, Qwen2 and Qwen3 checkpoints are written as GGUF without a tokenizer, since prompts are token ids.
"""

import heapq
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import llama_cpp as llama
import numpy as np

if TYPE_CHECKING:
    from benchmarks.baselines.worker import Setup

_TYPES = {"bfloat16": gguf.GGMLQuantizationType.BF16, "float32": gguf.GGMLQuantizationType.F32}


class Engine:
    def __init__(self, setup: "Setup") -> None:
        self.name = f"llama.cpp of llama-cpp-python {llama.__version__}"
        path = Path(setup.cache, f"{setup.dtype}.gguf")
        if not path.exists():
            _convert(Path(setup.model), path, setup.dtype)
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(str(path).encode(), llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_ctx = setup.max_model_len * setup.max_num_seqs  # every sequence has its own cells, in fp16 by default
        params.n_batch = self._max_batch = max(4096, setup.max_model_len)
        params.n_seq_max = setup.max_num_seqs
        params.n_threads = params.n_threads_batch = setup.num_threads
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp has made no context; its messages are above")
        self._memory = llama.llama_get_memory(self._context)
        self._batch = llama.llama_batch_init(self._max_batch, 0, 1)
        self._max_num_seqs = setup.max_num_seqs

    def run(self, *, prompts: list[list[int]], output_lens: list[int], sampling: dict[str, Any]) -> list[int]:
        sampler = _sampler(sampling)
        answers: list[list[int]] = [[] for _ in prompts]
        waiting = list(reversed(range(len(prompts))))  # the next one is last
        free = list(range(self._max_num_seqs))  # lowest first: llama.cpp splits a batch where sequences do not ascend by 1
        running: dict[int, int] = {}  # request -> sequence, in the order of their rows
        while waiting or running:
            self._batch.n_tokens = 0
            rows = {}
            for request, sequence in sorted(running.items(), key=lambda pair: pair[1]):
                num_known = len(prompts[request]) + len(answers[request])
                rows[request] = self._add(answers[request][-1], num_known - 1, sequence, is_last=True)
            while waiting and free and self._batch.n_tokens + len(prompts[waiting[-1]]) <= self._max_batch:
                request = waiting.pop()
                running[request] = heapq.heappop(free)
                last = len(prompts[request]) - 1
                for position, token in enumerate(prompts[request]):
                    rows[request] = self._add(token, position, running[request], is_last=position == last)
            if code := llama.llama_decode(self._context, self._batch):
                raise RuntimeError(f"llama_decode has failed with code {code}")
            for request, row in rows.items():
                answers[request].append(llama.llama_sampler_sample(sampler, self._context, row))
                if len(answers[request]) == output_lens[request]:
                    sequence = running.pop(request)
                    heapq.heappush(free, sequence)
                    llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        llama.llama_sampler_free(sampler)
        return [len(answer) for answer in answers]

    def _add(self, token: int, position: int, sequence: int, *, is_last: bool) -> int:
        """Add a token to the batch and return its row. is_last: compute its logits."""
        row = self._batch.n_tokens
        self._batch.token[row] = token
        self._batch.pos[row] = position
        self._batch.n_seq_id[row] = 1
        self._batch.seq_id[row][0] = sequence
        self._batch.logits[row] = is_last
        self._batch.n_tokens = row + 1
        return int(row)


def _sampler(sampling: dict[str, Any]) -> Any:
    chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    if sampling["temperature"] == 0:
        llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_greedy())
        return chain
    if sampling["top_k"]:
        llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_top_k(sampling["top_k"]))
    llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_temp(sampling["temperature"]))
    if sampling["top_p"] < 1:
        llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_top_p(sampling["top_p"], 1))
    llama.llama_sampler_chain_add(chain, llama.llama_sampler_init_dist(0))
    return chain


def _convert(model: Path, path: Path, dtype: str) -> None:
    """Write a checkpoint as GGUF: matrices in dtype, vectors and the position embedding in fp32."""
    config = json.loads((model / "config.json").read_text())
    if config["model_type"] not in ("gpt2", "qwen2", "qwen3"):
        raise ValueError(f"gpt2, qwen2 and qwen3 are supported with llama.cpp, not model_type {config['model_type']!r}")
    arch = gguf.MODEL_ARCH[config["model_type"].upper()]
    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(part, gguf.MODEL_ARCH_NAMES[arch])
    _add_sizes(writer, config)
    num_layers = config["n_layer"] if "n_layer" in config else config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(arch, num_layers)
    matrix_type = _TYPES[dtype]
    for file in sorted(model.glob("*.safetensors")):
        for name, values in _read_safetensors(file):
            if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):  # GPT-2 stores them transposed
                values = np.ascontiguousarray(values.T)
            new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
            is_vector = values.ndim == 1 or name.endswith("wpe.weight")
            kind = gguf.GGMLQuantizationType.F32 if is_vector else matrix_type
            writer.add_tensor(new_name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(path)


def _add_sizes(writer: Any, config: dict[str, Any]) -> None:
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config["vocab_size"])
    if config["model_type"] == "gpt2":
        writer.add_block_count(config["n_layer"])
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(config["n_embd"])
        writer.add_feed_forward_length(config["n_inner"] or 4 * config["n_embd"])
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        return
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])


def _read_safetensors(path: Path) -> list[tuple[str, np.ndarray]]:
    """Read tensors in fp32. The safetensors package has no bfloat16 for numpy."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    start = 8 + int(data[:8].view(np.uint64)[0])
    tensors = []
    for name, entry in json.loads(bytes(data[8:start])).items():
        if name == "__metadata__":
            continue
        first, end = (start + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "BF16":
            values = (data[first:end].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = data[first:end].view({"F32": np.float32, "F16": np.float16}[entry["dtype"]]).astype(np.float32)
        tensors.append((name, values.reshape(entry["shape"])))
    return tensors
