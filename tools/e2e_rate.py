#!/usr/bin/env python3
"""Steady rate of a run from its metrics/steps.jsonl: what a step takes once the first ones are over.

usage: e2e_rate.py RUN_DIR [WARM_STEPS]
"""
import json
import os
import statistics
import sys


def main():
    warm = int(sys.argv[2]) if len(sys.argv) > 2 else 5
    with open(os.path.join(sys.argv[1], "metrics", "steps.jsonl"), encoding="utf-8") as f:
        at = [json.loads(x)["wall_s"] for x in f]
    gaps = [b - a for a, b in zip(at[warm:], at[warm + 1:])]
    print(f"{len(gaps)} steps: median {1e3 * statistics.median(gaps):.1f} ms, mean {1e3 * statistics.mean(gaps):.1f} ms, worst {1e3 * max(gaps):.1f} ms")


if __name__ == "__main__":
    main()
