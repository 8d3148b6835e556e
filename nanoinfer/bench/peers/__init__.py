"""Engines that `nanoinfer bench throughput --compare` measures, each in its own Python because their pins clash with ours.

process.py runs here. It starts a peer's Python and exchanges messages with it. worker.py and the *_engine.py run as scripts in
the peer's Python. They import the standard library and the peer's packages, and nothing of nanoinfer.
"""
