"""A tool loop: the model calls a Python function, reads the result, and answers.

The bundled model has not learned tools, so it gets a template with a place for them, and the first call is required. With
LLM("Qwen/Qwen3-0.6B"), leave out chat_template and tool_choice: the model decides.
"""

import json
from typing import Literal

from nanoinfer import LLM, SamplingParams, parse_chat_answer

TEMPLATE = """{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


def weather(city: Literal["Oslo", "Rome"]) -> str:
    """Look up the weather.

    Args:
        city: The name of the city.
    """
    return {"Oslo": "snow", "Rome": "sun"}[city]


llm = LLM()
messages = [{"role": "user", "content": "Tell me a story about the weather in Rome"}]
params = SamplingParams(temperature=0, max_tokens=120)
while messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
    choice = "required" if len(messages) == 1 else "none"
    output = llm.chat(messages, params, use_tqdm=False, chat_template=TEMPLATE, tools=[weather], tool_choice=choice)[0]
    messages.append(parse_chat_answer(output.outputs[0].text, output.prompt))
    for call in messages[-1].get("tool_calls", []):
        result = weather(**json.loads(call["function"]["arguments"]))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        print(f"{call['function']['name']}({call['function']['arguments']}) -> {result}")
print(messages[-1]["content"])
