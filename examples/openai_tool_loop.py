"""A tool loop with OpenAI's client: the model calls a function, reads its result, and answers.

First: nanoinfer serve tiny-tools (or any server whose model has learned tools), and pip install openai.
"""

import json
import os

from openai import OpenAI


def weather(city: str) -> str:
    return {"Oslo": "snow", "Rome": "sun"}.get(city, "unknown")


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Look up the weather.", "parameters": PARAMETERS}}]

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "What is the weather in Rome?"}]
for _ in range(5):  # a model may call for ever
    message = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, seed=1).choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        print(message.content)
        break
    for call in message.tool_calls:
        result = weather(**json.loads(call.function.arguments))
        print(f"{call.function.name}({call.function.arguments}) -> {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
