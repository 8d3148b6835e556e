"""An answer that follows a JSON schema, with OpenAI's client. First: nanoinfer serve, with nanoinfer[structured] installed.

The schema is enforced while the answer is generated, so the JSON is valid with any model and at any temperature.
"""

import json
import os

from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "animal": {"enum": ["fox", "owl", "duck"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 12},
    },
    "required": ["name", "animal", "age"],
    "additionalProperties": False,
}

client = OpenAI(base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1"), api_key="none")
answer = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Tell me a story about Lily"}],
    response_format={"type": "json_schema", "json_schema": {"name": "hero", "schema": SCHEMA, "strict": True}},
    seed=1,
    max_tokens=100,
)
hero = json.loads(answer.choices[0].message.content)
print(f"{hero['name']} is a {hero['animal']} and {hero['age']} years old")
