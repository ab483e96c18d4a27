#!/usr/bin/env python3
"""What checkpoints cost a run: how long each took, and the steps that were committed meanwhile against the others.

usage: checkpoint_cost.py RUN_DIR        reads metrics/steps.jsonl and log.jsonl
"""
import json
import os
import re
import statistics
import sys


def lines(*path):
    with open(os.path.join(*path), encoding="utf-8") as f:
        return [json.loads(x) for x in f]


def main(run):
    wall = {x["step"]: x["wall_s"] for x in lines(run, "metrics", "steps.jsonl")}
    took = [re.match(r"checkpoint (\d+): ([0-9.]+) MiB on disk after ([0-9.]+) s", x["msg"]) for x in lines(run, "log.jsonl")]
    took = [(int(m[1]), float(m[2]), float(m[3])) for m in took if m]
    length = {s: wall[s] - wall[s - 1] for s in wall if s > 1 and s - 1 in wall}     # step 0 has the start in it
    busy = {s for n, _, t in took for s in length if wall[s] > wall.get(n - 1, 1e99) and wall[s - 1] < wall.get(n - 1, 1e99) + t}
    calm = [length[s] for s in length if s not in busy]
    for n, mib, t in took:
        meanwhile = {s: length[s] for s in length if s >= n and wall[s - 1] < wall.get(n - 1, 1e99) + t}
        print(f"checkpoint {n}: {mib:.0f} MiB in {t:.2f} s, {mib / 1024 / max(t, 0.005):.2f} GiB/s; steps meanwhile: "
              + (", ".join(f"{s}: {x:.2f} s" for s, x in sorted(meanwhile.items())[:6]) or "none"))
    if not calm or not took:
        print("no checkpoint, or no step without one")
        return 1
    calm_s = statistics.median(calm)
    lost = sum(max(0.0, length[s] - calm_s) for s in busy)
    print(f"a step without a checkpoint: median {calm_s:.3f} s of {len(calm)}; lost to {len(took)} checkpoints: {lost:.2f} s in {len(busy)} steps")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main(sys.argv[1]))
