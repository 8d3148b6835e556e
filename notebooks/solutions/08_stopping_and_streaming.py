"""Solutions of notebook 08."""

from definitions import definitions

from nanoinfer import LLM, Recorder, SamplingParams
from nanoinfer.features.tracing import TokenAppended

notebook = definitions("08_stopping_and_streaming")
notebook.llm = llm = LLM(device="cpu", tracer=(recorder := Recorder()))
notebook.tokenizer = tokenizer = llm.engine.tokenizer
story = notebook.tell().text

# Exercise 1: what stop="!" holds, and a stop string that holds as much as possible
recorder.clear()
notebook.tell(stop="!")
assert all(event.held == "" for event in recorder.of(TokenAppended))
# Nothing: a stop string of one character is either there or not. There is no first half of it.
recorder.clear()
end = notebook.tell(stop=story[:-1] + "?")
held = max(len(event.held) for event in recorder.of(TokenAppended))
print(f"{held} of {len(story)} characters were held")
# The story's own text with another last character: everything is held until the last token.
assert end.text == story
assert held >= len(story) - 5

# Exercise 2: one sign on the screen, three characters
ASTRONAUT = "👩‍🚀"
ids = tokenizer.encode(ASTRONAUT)
print(f"{len(ASTRONAUT)} characters, {len(ids)} ids")
for max_tokens in range(1, len(ids) + 1):
    params = SamplingParams(logits_processors=notebook.say(ASTRONAUT), max_tokens=max_tokens)
    text = llm.generate("There was", params, use_tqdm=False)[0].outputs[0].text
    print(max_tokens, text.encode("unicode_escape").decode())
    assert ASTRONAUT.startswith(text)
recorder.clear()
llm.generate("There was", params, use_tqdm=False)
most = max(event.num_held_ids for event in recorder.of(TokenAppended))
# At most three ids are held: the detokenizer knows characters of Unicode, of up to four bytes, not signs on the screen. So the
# stream shows the woman after four tokens, before the rocket.
assert most == 3

# Exercise 3: two stop strings that complete with the same token
for stop in ([" duck", "a kind duck"], ["a kind duck", " duck"]):
    end = notebook.tell(stop=stop)
    print(f"{stop}: stopped by {end.stop_reason!r}, text {end.text!r}")
    # Both complete at the same character. Then the first in the list wins.
    assert end.stop_reason == stop[0]
