"""OpenAI's client: one answer, and one that is streamed. First: nanoinfer serve, and pip install openai.

OPENAI_BASE_URL names another server. A seed gives the tokens that LLM gives, whatever else the server does.
"""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none")
model = client.models.list().data[0].id
question = {"role": "user", "content": "Tell me a story about Lily"}

answer = client.chat.completions.create(model=model, messages=[question], temperature=0.7, seed=1, max_tokens=24)
text = answer.choices[0].message.content
print(f"{text}\n[{answer.usage.completion_tokens} tokens, {answer.choices[0].finish_reason}]")

stream = client.chat.completions.create(
    model=model,
    messages=[question],
    temperature=0.7,
    seed=1,
    max_tokens=24,
    stream=True,
    stream_options={"include_usage": True},
    extra_body={"top_k": 0, "min_p": 0.0},  # what OpenAI's API does not have, by vLLM's names
)
streamed = ""
for chunk in stream:
    for choice in chunk.choices:  # none in the last chunk, which has the usage
        print(choice.delta.content or "", end="", flush=True)
        streamed += choice.delta.content or ""
print(f"\nthe same text: {streamed == text}")
