"""Copies to a device. Where there is no GPU, a stand-in for pinned memory shows what is copied."""

import pytest
import torch

from nanoinfer.system import transfer
from nanoinfer.system.transfer import integers_on_device, on_device

CPU = torch.device("cpu")
LISTS = [[1, 2, 3], [], [4], [5, 6]]


def test_lists_are_tensors_of_int64_even_if_some_are_empty():
    tensors = integers_on_device(LISTS, CPU)
    assert [tensor.tolist() for tensor in tensors] == LISTS
    assert {tensor.dtype for tensor in tensors} == {torch.int64}


def test_for_another_device_all_lists_are_one_copy_in_which_each_begins_at_a_multiple_of_16_bytes(monkeypatch):
    copies = []
    monkeypatch.setattr(transfer, "on_device", lambda tensor, device: copies.append(tensor) or tensor)
    tensors = integers_on_device(LISTS, torch.device("meta"))
    assert [tensor.tolist() for tensor in tensors] == LISTS
    [copy] = copies
    assert all((tensor.data_ptr() - copy.data_ptr()) % 16 == 0 for tensor in tensors)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_gets_the_same_numbers():
    tensors = integers_on_device(LISTS, torch.device("cuda"))
    assert [tensor.tolist() for tensor in tensors] == LISTS
    assert on_device(torch.arange(5), torch.device("cuda")).tolist() == [0, 1, 2, 3, 4]
