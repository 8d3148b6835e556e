"""Return the memory of a tensor to the system, but keep its address.

In: a tensor on a CPU. Later reads return the contents of a mapped file, or zeros.
"""

import ctypes
import mmap

from torch import Tensor


def release_pages(tensor: Tensor) -> None:
    """Return the whole pages of a contiguous tensor to the system, where madvise exists. The values are lost.

    The pages of a privately mapped file are read from the file again. Other memory becomes zeros, and takes no pages.
    """
    try:
        madvise, advice = ctypes.CDLL(None).madvise, mmap.MADV_DONTNEED
    except (OSError, AttributeError, TypeError):  # the system lacks it
        return
    start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end:
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice)
