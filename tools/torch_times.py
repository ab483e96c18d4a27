"""The two ways of measuring of actors/bench_times.h, for the PyTorch programs beside this file: sustained, and short.

A unit is one forward pass or one step.  sustained: one unit after the other, at least `runs` and `seconds`, the median unit.  short: bursts of
`burst` units after `rest` seconds without work, the median burst per unit.  Both wait for the device after each unit, as the actors do.
`queued` is sustained with a single wait at the end: what the waiting costs.
"""
import statistics
import time

import torch


def add_arguments(p):
    p.add_argument("--runs", type=int, default=10)
    p.add_argument("--seconds", type=float, default=3.0)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--burst", type=int, default=2)
    p.add_argument("--rest", type=float, default=0.5)


def wait():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def once(unit):
    wait()
    at = time.perf_counter()
    unit()
    wait()
    return time.perf_counter() - at


def sustained(unit, a):
    """Seconds of each unit."""
    times, begin = [], time.perf_counter()
    while len(times) < a.runs or time.perf_counter() - begin < a.seconds:
        times.append(once(unit))
    return times


def short(unit, a):
    """Seconds of a unit, one figure a burst."""
    times = []
    for _ in range(a.rounds):
        time.sleep(a.rest)
        times.append(sum(once(unit) for _ in range(a.burst)) / a.burst)
    return times


def queued(unit, a):
    """Seconds of a unit."""
    wait()
    at = time.perf_counter()
    for _ in range(a.runs):
        unit()
    wait()
    return (time.perf_counter() - at) / a.runs


def measure(unit, a):
    """Median seconds of a unit in each way, after two units of warm-up."""
    once(unit)
    once(unit)
    long = sustained(unit, a)
    return {"sustained": statistics.median(long), "short": statistics.median(short(unit, a)), "queued": queued(unit, a), "fastest": min(long),
            "runs": len(long)}
