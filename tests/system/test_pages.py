import mmap

import torch

from nanoinfer.system.pages import release_pages

PAGE = mmap.PAGESIZE


def ones(num_pages):
    memory = mmap.mmap(-1, num_pages * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.uint8).fill_(1)


def test_pages_of_a_privately_mapped_file_are_read_again(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"\x02" * 4 * PAGE)
    mapped = torch.from_file(str(path), shared=False, size=4 * PAGE, dtype=torch.uint8).fill_(1)
    release_pages(mapped)
    assert mapped.unique().tolist() == [2]


def test_whole_pages_of_other_memory_become_zeros_and_parts_of_pages_are_kept():
    tensor = ones(4)
    release_pages(tensor[PAGE - 1 : -1])
    assert [tensor[page * PAGE : (page + 1) * PAGE].unique().tolist() for page in range(4)] == [[1], [0], [0], [1]]
