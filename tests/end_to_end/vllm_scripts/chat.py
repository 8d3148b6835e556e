"""Conversations: one, a batch of them, and one with a chat template of its own."""

from vllm import LLM

conversation = [
    {"role": "system", "content": "You tell stories."},
    {"role": "user", "content": [{"type": "text", "text": "Hello."}, {"type": "text", "text": "Who are you?"}]},
    {"role": "assistant", "content": None},
    {"role": "user", "content": "Tell me a story about Lily"},
]


def print_outputs(outputs):
    for output in outputs:
        print(f"Prompt: {output.prompt!r}")
        print(f"Generated text: {output.outputs[0].text!r}")


def main():
    llm = LLM(model="tiny-qwen3", seed=None)
    sampling_params = llm.get_default_sampling_params()
    sampling_params.temperature, sampling_params.max_tokens, sampling_params.seed = 0.5, 16, 2

    print_outputs(llm.chat(conversation, sampling_params, use_tqdm=False, tools=None, chat_template_content_format="auto"))
    print_outputs(llm.chat([conversation for _ in range(3)], sampling_params, use_tqdm=True, lora_request=None))
    template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    print_outputs(llm.chat(conversation, sampling_params, False, chat_template=template, add_generation_prompt=False))


if __name__ == "__main__":
    main()
