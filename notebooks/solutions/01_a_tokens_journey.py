"""Solutions of notebook 01."""

import torch
from definitions import definitions

from nanoinfer import LLM, SamplingParams
from nanoinfer.attention.dense import DenseAttention
from nanoinfer.loading.checkpoint import Checkpoint
from nanoinfer.loading.loader import load_model
from nanoinfer.tokenization.tokenizer import Tokenizer
from nanoinfer_lab import stories

notebook = definitions("01_a_tokens_journey")
torch.set_grad_enabled(False)
checkpoint = Checkpoint.open("tiny-gpt2")
model, tokenizer = load_model(checkpoint), Tokenizer.load(checkpoint.path)
names = [tokenizer.encode(" " + name)[0] for name in stories.HEROES]


def logits_after(text):
    ids = torch.tensor(tokenizer.encode(text))
    return model.compute_logits(model(ids, torch.arange(len(ids)), DenseAttention())[-1])


# Exercise 1: what a space at the end, or a capital letter, does to the tokens and to the names
shares = {}
for text in (notebook.PROMPT, notebook.PROMPT + " ", notebook.PROMPT.replace("fox", "Fox")):
    tokens = [tokenizer.token_text(i) for i in tokenizer.encode(text)][-4:]
    shares[text] = logits_after(text).softmax(dim=-1)[names].sum().item()
    print(f"...{tokens}  probability of a name {shares[text]:.4f}")
# The space becomes a token of its own, after which a name with its space cannot come. In the stories no text ever looks like
# that, so the names lose their probability. "Fox" is two tokens, and the prompt still ends with " named".
assert shares[notebook.PROMPT] > 0.9 > shares[notebook.PROMPT + " "]

# Exercise 2: the intervals at temperature 3 without top_p, and a seed that draws no name
llm = LLM("tiny-gpt2", device="cpu", kv_cache_memory=2**22)
probabilities = (logits_after(notebook.PROMPT) / 3).softmax(dim=-1)
print(
    f"names have {probabilities[names].sum():.3f} of [0, 1) at temperature 3, the widest interval is {probabilities.max():.4f}"
)
# The intervals become more equal, and 1,935 tokens that are no name get a visible share together.
params = [SamplingParams(temperature=3.0, seed=seed, max_tokens=1) for seed in range(50)]
drawn = [output.outputs[0] for output in llm.generate([notebook.PROMPT] * 50, params, use_tqdm=False)]
seed = next(seed for seed, one in enumerate(drawn) if one.token_ids[0] not in names)
print(f"seed {seed} draws {drawn[seed].text!r}")

# Exercise 3: the logit lens on tiny-qwen3, whose head is not tied
qwen = load_model(Checkpoint.open("tiny-qwen3"))
ids = torch.tensor(tokenizer.encode(notebook.PROMPT))
positions, attend = torch.arange(len(ids)), DenseAttention()
x = qwen.embed_tokens(ids)
cos, sin = qwen.rotary_emb(positions, torch.float32)
for depth in range(len(qwen.layers) + 1):
    likeliest = qwen.compute_logits(qwen.norm(x[-1])).softmax(dim=-1)
    itself = likeliest[ids[-1]].item()
    print(
        f"layers passed: {depth}  ' named' {itself:.4f}, names {likeliest[names].sum():.3f}, first {likeliest.argmax().item()}"
    )
    if depth == 0:
        # The head has rows of its own, so the row of ' named' in the embedding does not fit its row in the head best.
        assert itself < 0.5
    if depth < len(qwen.layers):
        x = qwen.layers[depth](x, cos, sin, attend)
assert likeliest[names].sum() > 0.9
