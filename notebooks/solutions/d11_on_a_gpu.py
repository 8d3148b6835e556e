"""Solutions of notebook d11."""

from definitions import definitions

notebook = definitions("d11_on_a_gpu")

# Exercise 1: the kernels of a step

print(f"a decode step of one row has {5 * 28 + 10} kernels")

# Exercise 2: where the cache is read more than the weights


def first(**bits):
    """The fewest sequences of 1,000 tokens whose keys and values are more bytes than the weights."""
    for num_seqs in range(1, 257):
        weights, cache = notebook.bytes_of(num_seqs, 1000, **bits)
        if cache > weights:
            return num_seqs
    raise AssertionError("no step reads more of the cache")


print(f"from {first()} sequences on, and with int8 weights from {first(weight_bits=8)} on")
assert first(weight_bits=8) < first()
# The weights are read once for all sequences, and the cache for each. Half of the weights is reached by half as many.
