"""Engine arguments and sampling parameters from the command line, over the model's own defaults."""

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def create_parser():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="tiny-qwen3")
    sampling = parser.add_argument_group("Sampling parameters")
    sampling.add_argument("--max-tokens", type=int, default=12)
    sampling.add_argument("--temperature", type=float)
    sampling.add_argument("--top-p", type=float)
    sampling.add_argument("--top-k", type=int)
    return parser


def main(args):
    given = {name: args.pop(name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
    llm = LLM(**args)
    sampling_params = llm.get_default_sampling_params()
    for name, value in given.items():
        if value is not None:
            setattr(sampling_params, name, value)
    for output in llm.generate(["Once upon a time", "Lily was"], sampling_params):
        print(f"Prompt: {output.prompt!r}, Tokens: {len(output.outputs[0].token_ids)}, Text: {output.outputs[0].text!r}")


if __name__ == "__main__":
    command_line = "--max_num_seqs 4 --trust-remote-code --enforce-eager --max-model-len=128 --max_tokens 9 --top-k 5 --seed 0"
    main(vars(create_parser().parse_args(command_line.split())))
