"""The server as a Ray Serve deployment. First: pip install -e ".[ray-serve]" openai.

The same from a shell: serve run nanoinfer.cli.ray_serve:build_app model=tiny-qwen3. The environment may have a PORT.
"""

import os

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before Ray is imported: it sends usage statistics by default

import ray
from openai import OpenAI
from ray import serve

from nanoinfer.cli.ray_serve import build_app

port = int(os.environ.get("PORT", "8000"))
ray.init("local", num_cpus=2, object_store_memory=2**28, include_dashboard=False)  # or the address of a cluster
serve.start(http_options={"host": "127.0.0.1", "port": port})
serve.run(build_app({"model": "tiny-qwen3", "threads": 1, "seed": 0}))  # the options of nanoinfer serve

client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
question = {"role": "user", "content": "Tell me a story about Lily"}
for chunk in client.chat.completions.create(
    model="tiny-qwen3", messages=[question], temperature=0.7, seed=1, max_tokens=24, stream=True
):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
serve.shutdown()
