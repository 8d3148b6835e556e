"""Solutions of notebook d10."""

from dataclasses import replace

from definitions import definitions

from nanoinfer.config import EngineArgs
from nanoinfer.scheduling.scheduler import Scheduler
from nanoinfer_lab.simulate.hardware import HARDWARE
from nanoinfer_lab.simulate.simulator import requests_of, simulate

notebook = definitions("d10_which_settings_which_machine")


def share_on(machine, num_users, **settings):
    return notebook.share_of_good(notebook.predict(machine, notebook.load_of(num_users), **settings).figures)


# Exercise 1: how many users an M4 can serve
shares = {num_users: share_on(HARDWARE["M4"], num_users) for num_users in (10, 14, 18, 22)}
print("share of good requests on an M4:", {num_users: f"{share:.0%}" for num_users, share in shares.items()})
print("at most", max(num_users for num_users, share in shares.items() if share >= 0.95), "of these numbers of users")
assert shares[10] > shares[22]


# Exercise 2: the shortest prompt first
class ShortestFirst(Scheduler):
    def order_waiting(self, waiting):
        return sorted(waiting, key=lambda seq: len(seq.prompt_token_ids))


ttft = {}
for scheduler_cls in (Scheduler, ShortestFirst):
    settings = EngineArgs(dtype="bfloat16", scheduler_cls=scheduler_cls, max_num_seqs=8)
    result = simulate(notebook.QWEN, HARDWARE["laptop"], settings, requests_of(notebook.load_of(20)))
    ttft[scheduler_cls] = result.figures().ttft_ms
    print(
        f"{scheduler_cls.__name__}: TTFT {ttft[scheduler_cls].p50 / 1e3:.1f} s, 99% below {ttft[scheduler_cls].p99 / 1e3:.1f} s"
    )
assert ttft[ShortestFirst].p50 < ttft[Scheduler].p50
assert ttft[ShortestFirst].p99 > ttft[Scheduler].p99


# Exercise 3: twice the bandwidth, or twice the rate
laptop = HARDWARE["laptop"]
doubled = {
    "as it is": laptop,
    "twice the bandwidth": replace(laptop, bandwidth=2 * laptop.bandwidth),
    "twice the rate": replace(laptop, rates={dtype: 2 * rate for dtype, rate in laptop.rates.items()}),
}
good = {name: share_on(machine, 20) for name, machine in doubled.items()}
print({name: f"{share:.0%} good" for name, share in good.items()})
assert good["as it is"] < good["twice the bandwidth"] < good["twice the rate"]
