"""Ray Data sends the rows of a data set to a server. First: nanoinfer serve, and pip install "ray[data]".

OPENAI_BASE_URL names another server. A row has its own seed, so its answer does not depend on the order.
"""

import os

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before Ray is imported: it sends usage statistics by default

import ray
from ray.data.llm import HttpRequestProcessorConfig, build_processor

url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1") + "/completions"


def to_request(row):
    prompt = f"Once upon a time, there was a kind child named {row['hero']}."
    return {"payload": {"prompt": prompt, "temperature": 0.7, "seed": row["seed"], "max_tokens": 24}}


def to_text(row):
    return {"hero": row["hero"], "text": row["http_response"]["choices"][0]["text"]}


ray.init("local", num_cpus=2, object_store_memory=2**28, include_dashboard=False)  # or the address of a cluster
config = HttpRequestProcessorConfig(url=url, batch_size=2, concurrency=2)  # two workers, each of which sends a batch
processor = build_processor(config, preprocess=to_request, postprocess=to_text)
heroes = ray.data.from_items([{"hero": hero, "seed": seed} for seed, hero in enumerate(["Lily", "Ben", "Mia", "Tom"])])
for row in sorted(processor(heroes).take_all(), key=lambda row: row["hero"]):
    print(row["hero"] + ":" + row["text"])
