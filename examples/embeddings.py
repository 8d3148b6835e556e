"""Search by embeddings. A model such as Qwen/Qwen3-Embedding-0.6B finds meanings, the bundled one texts that end alike."""

import torch

from nanoinfer import LLM

llm = LLM()
documents = [
    "Once upon a time, there was a kind duck named Max.",
    "Lily had a red ball. She lost it in the park.",
    "Tom was a lazy fox. He slept all day.",
]
found = llm.embed(documents, use_tqdm=False)
matrix = torch.tensor([one.outputs.embedding for one in found])  # [num_documents, hidden], rows of length 1
for query in ("Lily lost a red ball in the park.", "Tim was a lazy dog. He slept all day."):
    vector = torch.tensor(llm.embed(query, use_tqdm=False)[0].outputs.embedding)
    cosines = matrix @ vector
    best = int(cosines.argmax())
    print(f"{query!r} is nearest to {documents[best]!r} ({cosines[best]:.2f})")

# llm.score(query, documents) has these cosines for an embedding model, whose checkpoint has a modules.json.
# Of a reranker, such as Qwen/Qwen3-Reranker-0.6B, it has the probability that a document answers the query.
