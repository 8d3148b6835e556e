"""Small requests do not wait for large ones, of which one is worked on at a time."""

import asyncio
import threading

import pytest

from nanoinfer.system import work_threads
from nanoinfer.system.work_threads import WorkThreads


def run(main):
    """Run a coroutine function with new threads."""

    async def with_threads():
        threads = WorkThreads()
        try:
            return await main(threads)
        finally:
            threads.close()

    return asyncio.run(with_threads())


def test_small_work_ends_while_large_work_has_not():
    async def main(threads):
        may_end = threading.Event()
        large = [asyncio.create_task(threads.run(may_end.wait, is_large=True)) for _ in range(20)]
        assert await threads.run(lambda: "small", is_large=False) == "small"
        assert not any(task.done() for task in large)
        may_end.set()
        assert await asyncio.gather(*large) == [True] * 20

    run(main)


@pytest.mark.parametrize("is_large", [True, False])
def test_one_thread_works_on_large_requests_and_several_on_small_ones(is_large):
    async def main(threads):
        arrive = threading.Barrier(2)

        def meet():
            try:
                return arrive.wait(timeout=0.2 if is_large else 60)
            except threading.BrokenBarrierError:
                return None

        return await asyncio.gather(*(threads.run(meet, is_large=is_large) for _ in range(2)))

    assert set(run(main)) == ({None} if is_large else {0, 1})


def test_memory_is_returned_once_after_several_large_requests(monkeypatch):
    returned = []
    monkeypatch.setattr(work_threads, "return_freed_memory", lambda: returned.append(1))

    async def main(threads):
        loop = asyncio.get_running_loop()
        planned = []
        monkeypatch.setattr(loop, "call_later", lambda delay, call: planned.append(call))
        for is_large in (False, True, True):
            await threads.run(int, is_large=is_large)
        assert len(planned) == 1
        planned[0]()
        await threads.run(int, is_large=True)  # in the same thread, afterwards
        assert len(planned) == 2

    run(main)
    assert returned == [1]


def test_an_error_is_that_of_the_function():
    def fail():
        raise KeyError("why")

    async def main(threads):
        with pytest.raises(KeyError, match="why"):
            await threads.run(fail, is_large=True)

    run(main)
