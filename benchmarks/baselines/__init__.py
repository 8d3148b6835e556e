"""The engines that compare.py runs, each in its own process and Python because their requirements conflict with ours.

process.py runs here. It starts an engine's Python and exchanges messages with it. worker.py and the *_engine.py run as scripts
in the engine's Python. They import the standard library and the engine's packages, and nothing of nanoinfer.
"""
