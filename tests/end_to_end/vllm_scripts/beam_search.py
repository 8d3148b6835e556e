"""Beam search on prompts as text and as token ids."""

from vllm import LLM
from vllm.inputs import TextPrompt, TokensPrompt
from vllm.sampling_params import BeamSearchParams


def main():
    llm = LLM(model="tiny-qwen3", enforce_eager=True)
    token_ids = llm.get_tokenizer().encode("Lily was a")
    prompts = [TextPrompt(prompt="Once upon a time, there was"), TokensPrompt(prompt_token_ids=token_ids)]
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=False, temperature=0.0, length_penalty=1.0)
    for output in llm.beam_search(prompts, params):
        best = output.sequences[0]
        print("Best:", best.text, best.cum_logprob)
        print("Falling:", [beam.cum_logprob for beam in output.sequences])
        print("Tokens:", llm.get_tokenizer().decode(best.tokens))


if __name__ == "__main__":
    main()
