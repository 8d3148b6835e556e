"""Beam search: the most likely whole answers, beside the greedy answer of the most likely token at each step."""

from nanoinfer import LLM, BeamSearchParams, SamplingParams

prompt = "Once upon a time, there was"
llm = LLM()

greedy = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=12, logprobs=0), use_tqdm=False)[0].outputs[0]
print(f"greedy  {greedy.cumulative_logprob:7.3f} {prompt}{greedy.text}")

for width in (2, 4, 8):
    found = llm.beam_search(prompt, BeamSearchParams(beam_width=width, max_tokens=12))[0]
    for beam in found.sequences[:2]:
        print(f"width {width} {beam.cumulative_logprob:7.3f} {prompt}{beam.text}")
