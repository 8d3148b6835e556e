"""What a GPU shows in ten minutes: `python -m benchmarks.device`.

__main__.py gives each part of parts.py a process and a share of the time. The parts are functions that yield results: checks.py
runs programs, engine.py measures the engine, kernels.py single kernels, and host.py the host's part, which needs no GPU.
"""
