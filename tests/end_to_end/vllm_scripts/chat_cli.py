"""A conversation, and ten of it, with arguments from the command line."""

from vllm import LLM, EngineArgs, SamplingParams
from vllm.utils import FlexibleArgumentParser


def main(args):
    template = args.pop("chat_template_path")
    sampling_params = SamplingParams(max_tokens=args.pop("max_tokens"), temperature=args.pop("temperature"), top_p=0.9)
    llm = LLM(**args)
    conversation = [
        {"role": "system", "content": "You tell stories."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! What shall I tell you?"},
        {"role": "user", "content": "Tell me a story about Lily"},
    ]
    assert template is None
    for output in llm.chat(conversation, sampling_params, use_tqdm=False):
        print(f"Prompt: {output.prompt!r}\nGenerated text: {output.outputs[0].text!r}")
    outputs = llm.chat([conversation for _ in range(10)], sampling_params, use_tqdm=True)
    print("Answers:", len(outputs))


if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="tiny-qwen3")
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--chat-template-path", type=str, default=None)
    main(vars(parser.parse_args(["--temperature", "0.7"])))
