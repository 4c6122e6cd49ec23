"""Time several ways of doing one thing so that a busy machine does not decide who wins.

Every round runs all of them once, in a shuffled order, and reads the CPU seconds of this
process: with one thread that clock does not run while others hold the core. What is reported is
the ratio inside a round, by its median and quartiles."""

import random
import statistics
import time
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile

# what every form must call, and no form of ours can make faster
KERNELS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "_grouped_mm")


@dataclass(frozen=True)
class Contender:
    """One way of doing it: `prepare()` is not timed, `run(prepared)` is."""

    prepare: object
    run: object


def interleave(contenders: dict, rounds: int, warm: int = 1, seed: int = 0) -> dict:
    """CPU seconds of each round for each name, the names in a new order every round."""
    order, names = random.Random(seed), list(contenders)
    seconds = {name: [] for name in names}
    for number in range(-warm, rounds):
        order.shuffle(names)
        for name in names:
            spent = timed(contenders[name])
            if number >= 0:
                seconds[name].append(spent)
    return seconds


def timed(contender: Contender) -> float:
    prepared = contender.prepare()
    start = time.process_time()
    contender.run(prepared)
    return time.process_time() - start


def ratios(seconds: dict, base: str, name: str) -> dict:
    """How many times faster `name` is than `base`: median and quartiles over the rounds."""
    pairs = zip(seconds[base], seconds[name], strict=True)
    low, median, high = statistics.quantiles([b / s for b, s in pairs], n=4)
    return {"q1": low, "median": median, "q3": high, "rounds": len(seconds[name])}


def kernel_share(contender: Contender) -> float:
    """The part of a run that passes inside matrix products and attention kernels.

    Looking costs time outside of them, so that the real share is somewhat larger."""
    prepared = contender.prepare()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        contender.run(prepared)
    events = seen.key_averages()
    inside = sum(e.self_cpu_time_total for e in events if is_kernel(e.key))
    return inside / sum(e.self_cpu_time_total for e in events)


def is_kernel(key: str) -> bool:
    name = key.removeprefix("aten::")
    return name in KERNELS or name.startswith("_scaled_dot_product_flash_attention")
