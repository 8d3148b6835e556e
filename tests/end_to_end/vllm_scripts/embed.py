"""After vLLM's examples/offline_inference/basic/embed.py, with a bundled model."""

from argparse import Namespace

from vllm import LLM, EngineArgs
from vllm.utils import FlexibleArgumentParser


def parse_args():
    parser = FlexibleArgumentParser()
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="tiny-qwen3", runner="pooling", enforce_eager=True)
    return parser.parse_args([])


def main(args: Namespace):
    prompts = ["Hello, my name is", "Lily was", "Once upon a time"]
    llm = LLM(**vars(args))
    outputs = llm.embed(prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        embeds = output.outputs.embedding
        embeds_trimmed = (str(embeds[:4])[:-1] + ", ...]") if len(embeds) > 4 else embeds
        print(f"Prompt: {prompt!r} \nEmbeddings: {embeds_trimmed} (size={len(embeds)})")


if __name__ == "__main__":
    main(parse_args())
