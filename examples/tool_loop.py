"""A tool loop: the model calls a Python function, reads the result, and answers."""

import json

from nanoinfer import LLM, SamplingParams, parse_chat_answer


def calculator(expression: str) -> str:
    """Compute an arithmetic expression.

    Args:
        expression: Two integers with +, - or * between them.
    """
    first, sign, second = expression.split()
    return str({"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[sign](int(first), int(second)))


def dictionary(word: str) -> str:
    """Look up the meaning of a word.

    Args:
        word: The word.
    """
    return {"brave": "not afraid", "shy": "afraid of new faces"}.get(word, "unknown")


llm = LLM("tiny-tools")  # it is bundled, and has learned little else. LLM("Qwen/Qwen3-0.6B") runs in the same loop
messages, tools = [], {"calculator": calculator, "dictionary": dictionary}
for question in ("What is 12 + 7?", "What does brave mean?"):
    messages.append({"role": "user", "content": question})
    while messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
        output = llm.chat(messages, SamplingParams(temperature=0, max_tokens=120), use_tqdm=False, tools=[*tools.values()])[0]
        messages.append(parse_chat_answer(output.outputs[0].text, output.prompt))
        for call in messages[-1].get("tool_calls", []):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": tools[name](**json.loads(arguments))})
            print(f"{name}({arguments}) -> {messages[-1]['content']}")
    print(f"{question} {messages[-1]['content']}")
