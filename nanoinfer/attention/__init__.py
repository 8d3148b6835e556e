"""Attention, and where its keys and values live: one small interface, several implementations.

base.py is the interface. dense.py has no cache at all: the lesson and the oracle. reference.py is the paged definition in
plain torch, on any device. cpu.py is fast on a CPU.
"""
