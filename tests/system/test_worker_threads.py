"""Small requests do not wait for large ones, of which one is worked on at a time."""

import asyncio
import threading

import pytest

from nanoinfer.errors import OutOfThreadsError
from nanoinfer.server.engine_thread import EngineThread
from nanoinfer.system.helper_process import HelperProcess
from nanoinfer.system.worker_threads import WorkerThreads


def run(main):
    """Run a coroutine function with new threads."""

    async def with_threads():
        threads = WorkerThreads()
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
                return arrive.wait(timeout=0.2 if is_large else 600)
            except threading.BrokenBarrierError:
                return None

        return await asyncio.gather(*(threads.run(meet, is_large=is_large) for _ in range(2)))

    assert set(run(main)) == ({None} if is_large else {0, 1})


def test_memory_is_returned_once_after_several_large_requests(monkeypatch):
    returned = []
    monkeypatch.setattr("nanoinfer.system.worker_threads.return_freed_memory", lambda: returned.append(1))

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


@pytest.fixture
def limited(monkeypatch):
    """Return a function that lets the system start so many more threads."""
    start = threading.Thread.start

    def limit(num):
        def start_if_allowed(thread):
            nonlocal num
            num -= 1
            if num < 0:
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_if_allowed)

    return limit


def test_work_is_done_by_the_threads_that_start_and_without_any_there_is_an_error(limited):
    async def main(threads):
        limited(1)
        arrive = threading.Event()
        waiting = asyncio.create_task(threads.run(arrive.wait, is_large=False))
        await asyncio.sleep(0)
        more = [asyncio.create_task(threads.run(lambda: "more", is_large=False)) for _ in range(3)]
        await asyncio.sleep(0)
        arrive.set()
        assert await asyncio.gather(waiting, *more) == [True, *["more"] * 3]
        with pytest.raises(OutOfThreadsError, match=r"starts no more threads; raise the limit of processes \(a container's"):
            await threads.run(lambda: "never", is_large=True)

    run(main)


def test_whatever_needs_a_thread_of_its_own_names_the_limit(limited):
    limited(0)
    helper = HelperProcess("nanoinfer.features.chat.template", "chats", max_wait=1, max_seconds=60)
    for start in (lambda: EngineThread(lambda: None, print, lambda: 0), lambda: helper.ask("{}")):
        with pytest.raises(OutOfThreadsError, match="the system starts no more threads; raise the limit"):
            start()
