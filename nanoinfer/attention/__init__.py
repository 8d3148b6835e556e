"""Attention and the paged KV cache: one small interface, several backends.

base.py is the interface and the table of backends. kv_cache.py holds the keys and values. dense.py has no cache: it is the
textbook form, and the oracle of the tests. reference.py defines paged attention in plain torch, on any device. cpu.py is the
fast backend on a CPU. flash.py, triton.py and torch_varlen.py run on a GPU.
"""
