"""A model calls a function, and answers with its result."""

import json

from vllm import LLM
from vllm.sampling_params import SamplingParams

sampling_params = SamplingParams(max_tokens=24, temperature=0.0)
llm = LLM(model="tiny-qwen3", tokenizer_mode="mistral", config_format="mistral", load_format="mistral")
template = (
    "{% for tool in tools %}{{ tool['function']['name'] }} {% endfor %}"
    "{% for one in messages %}{{ one['content'] }} {% endfor %}"
)


def get_current_weather(city: str, unit: str):
    return f"The weather in {city} is 85 degrees {unit}."


tools = [
    {
        "type": "function",
        "function": {
            "name": "get_current_weather",
            "description": "Get the weather of a city",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "The city"},
                    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
            },
        },
    }
]
messages = [{"role": "user", "content": "How warm is it in Dallas, in fahrenheit?"}]
output = llm.chat(messages, sampling_params=sampling_params, tools=tools, chat_template=template)[0]
print("The template has seen the tool:", "get_current_weather" in output.prompt)

messages.append({"role": "assistant", "content": output.outputs[0].text})
call = json.loads(
    '{"name": "get_current_weather", "arguments": {"city": "Dallas", "unit": "fahrenheit"}}'
)  # a large model's answer
messages.append({"role": "tool", "content": get_current_weather(**call["arguments"]), "tool_call_id": "a1b2c3d4e"})
output = llm.chat(messages, sampling_params, tools=tools, chat_template=template)[0]
print("It has seen the answer:", "85 degrees" in output.prompt, output.outputs[0].finish_reason)
