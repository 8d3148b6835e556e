"""Several threads that do the same."""

import threading


def run_in_threads(work, num=4):
    """Call work(0) .. work(num - 1), each in a thread, and wait for all."""
    threads = [threading.Thread(target=work, args=(i,)) for i in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
