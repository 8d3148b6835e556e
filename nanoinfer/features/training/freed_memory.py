"""Free the memory of tensors on a GPU, and allocate it again, perhaps elsewhere, under the same tensors and their views.

In: tensors. What keeps the address of a tensor, as a CUDA graph does, is invalid afterwards.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class FreedMemory:
    """The memory of tensors, which is freed with the instance. is_kept: its contents are in pinned memory of the host."""

    @torch.inference_mode()
    def __init__(self, tensors: Iterable[Tensor], *, is_kept: bool) -> None:
        self.is_kept, whole = is_kept, {}
        for tensor in tensors:
            memory = tensor.untyped_storage()
            whole[memory.data_ptr()] = tensor.detach().as_strided((memory.nbytes() // tensor.itemsize,), (1,), 0)
        self._memory = list(whole.values())  # as one tensor for each allocation, whatever views of it there are
        self._contents: list[Tensor] = []
        for one in self._memory if is_kept else ():
            self._contents.append(torch.empty(one.shape, dtype=one.dtype, pin_memory=True).copy_(one))
        for one in self._memory:
            one.untyped_storage().resize_(0)
        torch.get_device_module(self._memory[0].device).empty_cache()

    @torch.inference_mode()
    def take_back(self) -> bool:
        """Allocate the memory, with its contents if they are kept, or zeros. Returns is_kept."""
        for index, one in enumerate(self._memory):
            one.untyped_storage().resize_(one.nbytes)
            if self.is_kept:
                one.copy_(self._contents[index])
            else:
                one.zero_()
        return self.is_kept
