#!/usr/bin/env python3
"""Steady rate of a run from its metrics/steps.jsonl: what a step takes once the first ones are over.  One line.

usage: e2e_rate.py RUN_DIR [WARM_STEPS] [--target JSON --drafter JSON] [--gpu CSV]
--target, --drafter   what `bench-target --json` and `bench-drafter --json` printed for the same shape and microbatch: the step is set against
                      target and drafter one after the other for the same microbatches (sustained figures, scaled by tokens)
--gpu                 `nvidia-smi --query-gpu=timestamp,utilization.gpu,power.draw --format=csv,noheader,nounits -lms 100` during the run: the mean
                      over the same steps.  The file of steps was last written with the last step: that ties their times to the clock.
"""
import argparse
import datetime
import json
import os
import statistics


def load(path):
    with open(path, encoding="utf-8") as f:
        return json.loads(f.read())


def one_after_the_other(lines, a):
    """Milliseconds of a step in which nothing overlaps, and how they come about."""
    target, drafter = load(a.target), load(a.drafter)
    mix, d = target["mixes"][0], drafter["sustained"]
    tokens, items = statistics.mean(x["tokens"] for x in lines), statistics.mean(x["items"] for x in lines)
    t = mix["sustained"]["alone_ms"] / mix["tokens"] * tokens
    w = d["forward_backward_ms"] / (drafter["tokens"] * drafter["seqs"]) * tokens
    rest = d["sum_ms"] + d["apply_ms"] + d["zero_ms"]
    blocks = statistics.mean(x["blocks"] for x in lines) / items
    want = drafter["anchors"] * drafter["seqs"]
    note = "" if abs(blocks / want - 1) < 0.02 else f" (blocks a microbatch: {blocks:.0f}, in the bench {want}: not the same work)"
    return t + w + rest, f"target {t:.1f} + drafter {w:.1f} + sum, AdamW, zero {rest:.1f}{note}"


def samples(path, begin, end):
    """(busy %, watts) of the samples in that time."""
    out = []
    with open(path, encoding="utf-8", errors="replace") as f:
        for line in f:
            field = [x.strip() for x in line.split(",")]
            try:
                at = datetime.datetime.strptime(field[0], "%Y/%m/%d %H:%M:%S.%f").timestamp()
                if begin <= at <= end:
                    out.append((float(field[1]), float(field[2])))
            except (ValueError, IndexError):                  # cut off, or [N/A]
                continue
    return out


def gpu(a, path, at):
    end = os.path.getmtime(path)
    s = samples(a.gpu, end - (at[-1] - at[a.warm]), end)
    if not s:
        return "; GPU: no samples in that time"
    busy = [x for x, _ in s]
    return f"; GPU busy {statistics.mean(busy):.1f} % (least {min(busy):.0f} %, {len(s)} samples), {statistics.mean(w for _, w in s):.0f} W"


def main():
    p = argparse.ArgumentParser()
    p.add_argument("dir")
    p.add_argument("warm", nargs="?", type=int, default=5)
    for name in ("target", "drafter", "gpu"):
        p.add_argument("--" + name)
    a = p.parse_args()
    path = os.path.join(a.dir, "metrics", "steps.jsonl")
    with open(path, encoding="utf-8") as f:
        lines = [json.loads(x) for x in f]
    at = [x["wall_s"] for x in lines]
    if len(at) < a.warm + 2:
        raise SystemExit(f"{path}: {len(at)} steps, and {a.warm + 2} are needed")
    gaps, steady = [b - c for c, b in zip(at[a.warm:], at[a.warm + 1:])], lines[a.warm + 1:]
    mean = 1e3 * statistics.mean(gaps)
    tokens = sum(x["tokens"] for x in steady)
    text = (f"{len(gaps)} steps: median {1e3 * statistics.median(gaps):.1f} ms, mean {mean:.1f} ms, worst {1e3 * max(gaps):.1f} ms, "
            f"{tokens / sum(gaps):.0f} tokens/s")
    if a.target and a.drafter:
        ms, how = one_after_the_other(steady, a)
        text += f"; one after the other {ms:.1f} ms = {how}: {tokens / len(gaps) / ms * 1e3:.0f} tokens/s, the run {ms / mean:.3f} of it"
    print(text + (gpu(a, path, at) if a.gpu else ""))


if __name__ == "__main__":
    main()
