"""Embeddings and scores are those of transformers, whatever runs beside them, and other wishes of a checkpoint are refused."""

import json
import shutil
from functools import partial

import pytest
import torch
import transformers
from tokenizers import normalizers
from transformers import AutoTokenizer

import nanoinfer
from nanoinfer import LLM, SamplingParams, errors
from nanoinfer.features.embedding.pooling import INSTRUCTION, PoolingParams
from tests.helpers import tiny_models
from tests.helpers.pooling_cases import NEWER, POOLING, write_modules
from tests.helpers.tiny_models import assert_nothing_is_left

SETTINGS = {"dtype": "float32", "kv_cache_memory": 2**22, "seed": 0}
IDS = [[index * index % 96 for index in range(num)] for num in (140, 1, 17, 2, 64)]
TEXTS = ["Once upon a time", "a little dog", "", "Once upon a time there was a little dog. " * 9]


def hidden_of(path, ids):
    """transformers' last hidden rows of each text, alone."""
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(torch.tensor([one])).last_hidden_state[0] for one in ids]


def unit(row):
    return row / row.norm()


def ids_of(outputs):
    return [one.prompt_token_ids for one in outputs]


def vectors(outputs):
    return [torch.tensor(one.outputs.embedding) for one in outputs]


def largest_difference(found, wanted):
    return max(float((one - other).abs().max()) for one, other in zip(found, wanted, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_window", "gemma3_window"])
def test_embeddings_are_those_of_transformers(tmp_path, family):
    path = tiny_models.save(family, tmp_path)
    rows = hidden_of(path, IDS)
    with LLM(path, chunk_size=64, max_num_batched_tokens=128, **SETTINGS) as llm:
        for mode in ("lasttoken", "mean"):
            write_modules(path, NEWER, "x.Pooling", "x.Normalize", Pooling={"pooling_mode": mode})
            wanted = [one[-1] if mode == "lasttoken" else one.mean(0) for one in rows]
            found = vectors(llm.embed(IDS, use_tqdm=False))
            assert largest_difference(found, [unit(one) for one in wanted]) < 1e-5
            short = llm.embed(IDS, use_tqdm=False, pooling_params=PoolingParams(dimensions=8))
            assert largest_difference(vectors(short), [unit(one[:8]) for one in wanted]) < 1e-5
        assert_nothing_is_left(llm)


def test_without_modules_json_the_last_row_is_normalised_and_without_normalize_it_is_not(tmp_path):
    path = tiny_models.save("qwen3", tmp_path)
    wanted = [one[-1] for one in hidden_of(path, IDS)]
    with LLM(path, runner="pooling", **SETTINGS) as llm:
        outputs = llm.embed(IDS, use_tqdm=False)
        assert isinstance(outputs[0], nanoinfer.EmbeddingRequestOutput)
        assert largest_difference(vectors(outputs), [unit(one) for one in wanted]) < 1e-5
        write_modules(path, NEWER, "x.Pooling", Pooling=POOLING["last"])
        assert largest_difference(vectors(llm.embed(IDS, use_tqdm=False)), wanted) < 1e-4
        assert max(float(one.norm()) for one in wanted) > 2, "they are not normalised by chance"


def test_a_model_that_was_saved_without_its_head_has_the_same_embeddings_and_says_what_it_lacks(tmp_path, caplog):
    whole = tiny_models.save("qwen3", tmp_path / "whole")
    transformers.AutoModel.from_pretrained(whole).save_pretrained(tmp_path / "body")
    assert json.loads((tmp_path / "body" / "config.json").read_text())["architectures"] == ["Qwen3Model"]
    with LLM(whole, **SETTINGS) as llm, LLM(tmp_path / "body", **SETTINGS) as body:
        assert vectors(body.embed(IDS, use_tqdm=False))[0].equal(vectors(llm.embed(IDS, use_tqdm=False))[0])
    texts = [record.getMessage() for record in caplog.records if "LM head" in record.getMessage()]
    assert texts == [f"{tmp_path / 'body'} was saved without its LM head: embed() works, but generated texts have no meaning"]


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "qwen3_window"])
def test_an_embedding_has_the_same_bits_in_any_batch_and_after_preemptions(tmp_path, family):
    path = write_modules(tiny_models.save(family, tmp_path), NEWER, "x.Pooling", Pooling=POOLING["older"])
    with LLM(path, chunk_size=16, **SETTINGS) as llm:
        assert llm.batch_independent
        alone = [llm.embed([one], use_tqdm=False)[0].outputs.embedding for one in IDS]
        assert [one.outputs.embedding for one in llm.embed(IDS, use_tqdm=False)] == alone
        assert [one.outputs.embedding for one in llm.embed(IDS[::-1], use_tqdm=False)][::-1] == alone
    with LLM(path, chunk_size=16, **SETTINGS | {"kv_cache_memory": 2**18, "max_model_len": 320}) as small:
        streams = [small.stream([3] * 150, SamplingParams(max_tokens=150, ignore_eos=True, detokenize=False)) for _ in range(3)]
        for stream in streams:
            next(stream)
        assert [one.outputs.embedding for one in small.embed(IDS, use_tqdm=False)] == alone
        for stream in streams:
            stream.close()
        assert_nothing_is_left(small)


def test_a_text_ends_as_its_tokenizer_ends_it_also_when_it_is_truncated(embedding_path):
    hf = AutoTokenizer.from_pretrained(embedding_path)
    with LLM(embedding_path, **SETTINGS) as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
        assert ids_of(outputs) == hf(TEXTS)["input_ids"]
        cut = llm.embed(TEXTS, use_tqdm=False, truncate_prompt_tokens=5)
        assert ids_of(cut) == hf(TEXTS, truncation=True, max_length=5)["input_ids"]
        assert ids_of(llm.embed([list(range(9))], truncate_prompt_tokens=5)) == [list(range(5))]
        long = "a little dog " * 600
        with pytest.raises(
            errors.InvalidPromptError, match=r"prompt 1: .*maximum context length is 512 tokens.* has 1802 tokens"
        ):
            llm.embed(["a", long], use_tqdm=False)
        [whole] = ids_of(llm.embed(long, use_tqdm=False, truncate_prompt_tokens=-1))
        assert (len(whole), whole[-1]) == (512, hf.eos_token_id)


PROMPTS = {"prompts": {"query": "Query: ", "document": "DOC "}, "default_prompt_name": "query"}


TRANSFORMERS = [  # sentence_bert_config.json, config_sentence_transformers.json, and the prompt that is written before a text
    ({"max_seq_length": 5, "do_lower_case": False}, {}, ""),
    ({"max_seq_length": None, "do_lower_case": True}, {}, ""),
    ({}, PROMPTS, "Query: "),
    ({}, PROMPTS | {"default_prompt_name": None}, ""),
    ({"max_seq_length": 9, "do_lower_case": True}, PROMPTS | {"default_prompt_name": "document"}, "DOC "),
]


@pytest.mark.slow
def test_texts_are_cut_lower_cased_and_prefixed_as_sentence_transformers_does(embedding_path, tmp_path):
    """It gives max_seq_length to the tokenizer as model_max_length, and puts Lowercase before its normalizers."""
    path = shutil.copytree(embedding_path, tmp_path / "model")
    texts = ["Once UPON a time", "a little ΣΑΣ", "", "Once upon a TIME there was a little dog. " * 9]
    for transformer, prompts, prompt in TRANSFORMERS:
        (path / "sentence_bert_config.json").write_text(json.dumps(transformer))
        (path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
        hf = AutoTokenizer.from_pretrained(path)
        if transformer.get("do_lower_case"):
            own = hf.backend_tokenizer.normalizer
            hf.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *([own] if own else [])])
        most = transformer.get("max_seq_length") or 512
        wanted = hf([prompt + text for text in texts], truncation=True, max_length=most)["input_ids"]
        with LLM(path, **SETTINGS) as llm:
            outputs = llm.embed(texts, use_tqdm=False)
            assert ids_of(outputs) == wanted
            rows = hidden_of(path, wanted)
            assert largest_difference(vectors(outputs), [unit(one.mean(0)) for one in rows]) < 1e-5
            assert llm.embed({"prompt": texts[0]}, use_tqdm=False)[0].outputs == outputs[0].outputs
            assert ids_of(llm.embed([[1, 2]], use_tqdm=False)) == [[1, 2]], "ids have no prompt"
            [whole] = ids_of(llm.embed(texts[3], use_tqdm=False, truncate_prompt_tokens=-1))
            assert len(whole) > 80, "the argument goes before the checkpoint's"


BERT, PREFIXES = "sentence_bert_config.json", "config_sentence_transformers.json"
UNSUPPORTED = [
    (BERT, {"max_seq_length": 0}, "max_seq_length must be >= 1, got 0"),
    (BERT, {"max_seq_length": "5"}, "max_seq_length must be an integer or None, got '5'"),
    (BERT, {"do_lower_case": 1}, "do_lower_case must be True or False, got 1"),
    (BERT, {"processing_kwargs": {"text": {}}}, "processing_kwargs must be None, got"),
    (PREFIXES, {"default_prompt_name": "query"}, "must name one of its prompts, got 'query'"),
    (PREFIXES, PROMPTS, "without its default prompt .include_prompt."),
    ("modules.json", "[", "modules.json"),
    ("modules.json", "[1]", "modules.json"),
    ("modules.json", '[{"type": "x.Pooling", "path": "../other"}]', "modules.json"),
    ("modules.json", '{"a": 1}', "modules.json"),
]
MODULES = [  # modules, their settings, and what is said
    ("x.Dense", {}, "has the module 'Dense'"),
    ("x.Pooling", {"Pooling": {"pooling_mode_cls_token": True}}, "pooling.*cls_token"),
    ("x.Pooling", {"Pooling": {"pooling_mode_max_tokens": True} | POOLING["last"]}, "max_tok"),
]


def test_settings_of_sentence_transformers_that_are_not_supported_are_refused_by_name(embedding_path, tmp_path):
    path = shutil.copytree(embedding_path, tmp_path / "model")
    with LLM(path, **SETTINGS) as llm:
        for name, content, words in UNSUPPORTED:
            write_modules(path, NEWER, "x.Pooling", Pooling={"pooling_mode": "mean", "include_prompt": False})
            (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
            with pytest.raises(errors.CheckpointError if name == "modules.json" else errors.NanoinferError, match=words):
                llm.embed("a")
            (path / name).unlink()
        for module, settings, words in MODULES:
            write_modules(path, NEWER, module, **settings)
            with pytest.raises(errors.UnsupportedError, match=words):
                llm.embed([[1, 2]])
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    with pytest.raises(errors.UnsupportedError, match="is_causal must be True, got False; others are not supported"):
        LLM(path, **SETTINGS)


def test_wrong_arguments_are_refused_before_anything_runs(qwen3_path):
    with LLM(qwen3_path, **SETTINGS) as llm:
        for params, words in (({"dimensions": 49}, "at most the model's 48"), ({"truncate_prompt_tokens": 513}, "at most")):
            with pytest.raises(errors.InvalidValueError, match=words):
                llm.embed([[1, 2]], pooling_params=PoolingParams(**params))
        for params in ({"dimensions": 0}, {"truncate_prompt_tokens": -2}, {"truncate_prompt_tokens": 0}):
            with pytest.raises(errors.InvalidValueError, match=next(iter(params))):
                PoolingParams(**params)
        with pytest.raises(errors.InvalidTypeError, match="did you mean dimensions"):
            PoolingParams(dimension=3)
        for call, params in ((llm.embed, SamplingParams()), (partial(llm.score, "a"), {"dimensions": 3})):
            with pytest.raises(errors.InvalidTypeError, match="pooling_params must be PoolingParams"):
                call("b", pooling_params=params)
        for call in (llm.embed, partial(llm.score, "a")):
            with pytest.raises(errors.InvalidValueError, match=r"truncate_prompt_tokens, or pooling_params, .* not both"):
                call("b", pooling_params=PoolingParams(), truncate_prompt_tokens=3)
        with pytest.raises(errors.UnsupportedError, match="no reranker"):
            llm.score("a", "b")


# ---- scores

TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n',
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)
QUERIES, DOCUMENTS = ["little dog", "a red ball"], ["The dog was happy.", "It was a ball. " * 30]


def test_a_rerankers_score_is_the_probability_of_yes_in_qwens_template(reranker_path):
    hf = AutoTokenizer.from_pretrained(reranker_path)
    before, after = (hf.encode(text, add_special_tokens=False) for text in TEMPLATE)
    bodies = [
        f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        for instruction in (INSTRUCTION, "Judge")
        for query, document in zip(QUERIES, DOCUMENTS, strict=True)
    ]
    ids = [before + hf.encode(body, add_special_tokens=False) + after for body in bodies]
    model = transformers.AutoModelForCausalLM.from_pretrained(reranker_path, dtype=torch.float32).eval()
    answers = [hf.convert_tokens_to_ids("no"), hf.convert_tokens_to_ids("yes")]
    with torch.no_grad():
        wanted = [float(model(torch.tensor([one])).logits[0, -1, answers].softmax(-1)[1]) for one in ids]
    with LLM(reranker_path, max_num_batched_tokens=256, chunk_size=64, **SETTINGS) as llm:
        outputs = llm.score(QUERIES, DOCUMENTS, use_tqdm=False) + llm.score(QUERIES, DOCUMENTS, False, instruction="Judge")
        assert [one.prompt_token_ids for one in outputs] == ids
        assert [one.outputs.score for one in outputs] == pytest.approx(wanted, abs=1e-5)
        assert len({round(one, 3) for one in wanted}) == 4, "the scores differ"
        assert llm.score(QUERIES[0], DOCUMENTS, use_tqdm=False)[0].outputs == outputs[0].outputs
        cut = llm.score(QUERIES[1], DOCUMENTS[1], use_tqdm=False, truncate_prompt_tokens=len(before) + len(after) + 7)[0]
        assert cut.prompt_token_ids == before + hf.encode(bodies[1], add_special_tokens=False)[:7] + after
        with pytest.raises(errors.InvalidValueError, match="this is a reranker; leave it out, got 3"):
            llm.score(QUERIES, DOCUMENTS, pooling_params=PoolingParams(dimensions=3))
        for queries, documents in (([], DOCUMENTS), (QUERIES, DOCUMENTS[:1]), (QUERIES[:1], [])):
            numbers = f"{len(queries)} queries and {len(documents)} documents"
            with pytest.raises(
                errors.InvalidValueError, match=f"must be documents, and one query, or one for each .* got {numbers}"
            ):
                llm.score(queries, documents)
        for wrong in ([1], 5, None, {"content": "b"}):
            with pytest.raises(errors.InvalidTypeError, match="queries and documents must be strings or lists of strings, got"):
                llm.score("a", wrong)
        assert_nothing_is_left(llm)


def test_an_embedding_models_score_is_the_cosine(embedding_path):
    with LLM(embedding_path, **SETTINGS) as llm:
        query, *documents = vectors(llm.embed([QUERIES[0], *DOCUMENTS], use_tqdm=False))
        outputs = llm.score(QUERIES[0], DOCUMENTS, use_tqdm=False)
        assert [one.outputs.score for one in outputs] == pytest.approx([float(query @ one) for one in documents], abs=1e-6)
        with pytest.raises(errors.InvalidValueError, match="instruction is for rerankers"):
            llm.score("a", "b", instruction="Judge")


def test_a_step_computes_the_logits_once_and_the_answers_of_a_logit_score_must_be_no_and_yes(reranker_path, tmp_path):
    path = shutil.copytree(reranker_path, tmp_path / "model")
    hf = AutoTokenizer.from_pretrained(path)
    ids = {"false_token_id": hf.convert_tokens_to_ids("no"), "true_token_id": hf.convert_tokens_to_ids("yes")}
    with LLM(path, **SETTINGS) as llm:
        wanted = [one.outputs for one in llm.score(QUERIES, DOCUMENTS, use_tqdm=False)]
        model, num_rows = llm.engine.executor.runner.model, []
        compute = model.compute_logits
        model.compute_logits = lambda hidden: (num_rows.append(len(hidden)), compute(hidden))[1]
        write_modules(path, NEWER, "x.LogitScore", LogitScore=ids)
        assert [one.outputs for one in llm.score(QUERIES, DOCUMENTS, use_tqdm=False)] == wanted
        assert sum(num_rows) == len(QUERIES)
        write_modules(path, NEWER, "x.LogitScore", LogitScore=ids | {"false_token_id": None})
        with pytest.raises(errors.UnsupportedError, match="no reranker"):
            llm.score("a", "b")
