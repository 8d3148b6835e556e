"""Record a generation, print a few events, and write trace.html, which replays the generation in a browser."""

from nanoinfer import LLM, Recorder, SamplingParams
from nanoinfer.features.tracing import BlocksShared, StepScheduled, TokenDrawn

recorder = Recorder(stages=True)  # stages: also record every stage of the sampler
llm = LLM(tracer=recorder, block_size=8)
beginning = "Once upon a time, there was a kind duck named"
llm.generate([beginning, beginning + " Max", "Lily was"], SamplingParams(top_k=5, seed=1, max_tokens=20), use_tqdm=False)
llm.generate(beginning + " Rosie", SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)  # shares a block

for event in recorder.of(StepScheduled)[:3]:
    print(f"step {event.step}: {dict(zip(event.sequence_ids, event.num_new_tokens, strict=True))} tokens of each sequence")
for event in recorder.of(BlocksShared):
    print(f"sequence {event.sequence_id} found its beginning in blocks {event.blocks}")
for event in recorder.of(TokenDrawn)[9:12]:
    print(f"sequence {event.sequence_id}: u = {event.u:.3f} fell into {event.low:.3f} .. {event.high:.3f}, {event.token!r}")
recorder.to_html("trace.html")
recorder.to_jsonl("trace.jsonl")
