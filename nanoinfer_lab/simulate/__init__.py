"""A simulator of serving: the engine's scheduler and block manager on a virtual clock. cli/simulate.py is the command.

Nothing here imports torch.
"""
