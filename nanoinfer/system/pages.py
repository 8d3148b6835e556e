"""Give the memory of a tensor back to the system, and keep its address.

In: a tensor on a CPU. Out: nothing. What is read from it later is what a mapped file holds, or zeros.
"""

import ctypes
import mmap

from torch import Tensor


def release_pages(tensor: Tensor) -> None:
    """Return the whole pages of a contiguous tensor to the system, where the system has madvise. Its values are lost.

    The pages of a privately mapped file are read from the file again. Any other memory is zeros, and takes pages when it is
    written.
    """
    try:
        madvise, advice = ctypes.CDLL(None).madvise, mmap.MADV_DONTNEED
    except (OSError, AttributeError, TypeError):  # a system without it
        return
    start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end:
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice)
