"""Programs of the project that are not part of the package, run from a clone: `python -m tools.stories.train`."""
