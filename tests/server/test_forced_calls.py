"""Forced and strict calls, with schemas of real APIs: over each chat API, whole and streamed, a model of noise obeys them."""

import json
import random
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest

from nanoinfer import AsyncLLM
from tests.helpers import http_server, tool_cases
from tests.helpers.doors import CHATS, check_stream, finite
from tests.helpers.structured_cases import SCHEMAS

pytestmark = pytest.mark.slow

FUNCTIONS = [{"name": f"f{i}", "parameters": one} for i, one in enumerate(SCHEMAS) if one.get("type") == "object"]
MODES = ("required", "auto")
FORMATS = jsonschema.FormatChecker(["email", "ipv4", "uuid"])  # a date may be February 31: a grammar has no calendar
NUM_TOKENS = 300  # noise may write longer strings and numbers


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tool_cases.save_checkpoint(tmp_path_factory.mktemp("forced"), max_position_embeddings=2**15)
    with http_server.serving(lambda: AsyncLLM(path, kv_cache_memory=2**28, max_num_seqs=32)) as running:
        yield running


def num_calls(server, door, seed):
    """The number of calls in the answer to a request with this seed, which are checked. None: it was refused or cut."""
    rng, tokenizer = random.Random(seed), server.async_llm.llm.get_tokenizer()
    functions = [FUNCTIONS[seed % len(FUNCTIONS)], *rng.sample(FUNCTIONS, rng.choice([0, 0, 2]))]
    schemas = {one["name"]: one["parameters"] for one in functions}
    choice, thinks = rng.choice([*MODES, functions[0]["name"]]), rng.random() < 0.3
    likely = dict.fromkeys(['"', "]", "}", *["</think>"] * thinks], 9)  # so that noise comes to an end
    likely["<|im_end|>"] = rng.choice([0, 100])
    if choice == "auto":
        functions = [one | {"strict": True} for one in functions]
        likely |= {"<|im_end|>": 12, "<tool_call>": 15}
    asked = {
        "seed": seed,
        "temperature": rng.choice([0.5, 1.0, 1.5]),
        "logit_bias": {str(tokenizer.convert_tokens_to_ids(token)): bias for token, bias in likely.items()},
        "chat_template_kwargs": {"enable_thinking": thinks},
    }
    body = door.body("How warm is Oslo?", functions=functions, choice=choice, max_tokens=NUM_TOKENS, **asked)
    whole = server.post(door.path, body)
    if whole.status_code == 400:
        assert "these keywords cannot be enforced" in whole.text
        return None
    reply = check_stream(server, door, body, whole.json())
    if reply.reasons == ["length"]:
        return None
    assert reply.calls or choice == "auto"
    for name, arguments in reply.calls:
        assert choice in (*MODES, name)
        values = json.loads(arguments, parse_float=finite)
        jsonschema.Draft202012Validator(schemas[name], format_checker=FORMATS).validate(values)
    return len(reply.calls)


@pytest.mark.parametrize("num_requests", [1, pytest.param(200, marks=pytest.mark.long)])
@pytest.mark.parametrize("door", CHATS)
def test_every_forced_or_strict_call_obeys_its_schema(server, door, num_requests):
    """num_requests: whose answers have calls, and are not cut."""
    seeds, found, num_sent = iter(range(10**9)), [], 0
    with ThreadPoolExecutor(16) as threads:
        while len(found) < num_requests:
            some = [next(seeds) for _ in range(num_requests - len(found))]
            num_sent += len(some)
            found += filter(None, threads.map(lambda seed: num_calls(server, door, seed), some))
            assert num_sent < 100 or len(found) > 0.5 * num_sent  # of few the share varies
