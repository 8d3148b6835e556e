"""The engine's functions as tasks, their checks, and the export of one file."""
