"""Caches of their own for tests, in which no kernel is compiled twice."""

from nanoinfer.fast.cpu import native


def with_kernels(path):
    """Make a folder a cache that has the compiled kernels of this process's cache, and keeps new ones there."""
    kernels = native.cache_folder() / "kernels"
    kernels.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    (path / "kernels").symlink_to(kernels.resolve(), target_is_directory=True)
    return path
