#!/usr/bin/env python3
"""Checks the ledger of a run with nothing but the standard library.

usage: ledger_check.py RUNDIR [--partial]

Every step is there once and in order; every microbatch is in exactly one step; no sample is used twice in an epoch; and the buckets
of each step are the largest-remainder apportionment of what was left of its epoch: floor(m * left[b] / sum(left)) seats a bucket, the
seats that remain go to the largest remainders m * left[b] mod sum(left), ties to the lower bucket.
--partial: the run was stopped early, so its last epoch is incomplete and the mix of that epoch cannot be known from the ledger.
Exit code 0 when all holds, 1 when something does not, 2 for usage.
"""
import collections
import json
import os
import sys


def apportion(left, m):
    total = sum(left.values())
    seats = {b: m * n // total for b, n in left.items()}
    rest = m - sum(seats.values())
    for b in sorted(left, key=lambda b: (-(m * left[b] % total), b))[:rest]:
        seats[b] += 1
    return seats


def read_ledger(path):
    lines = []
    with open(path, encoding="utf-8") as f:
        for number, text in enumerate(f, 1):
            try:
                lines.append(json.loads(text))
            except ValueError as e:
                sys.exit(f"{path}:{number}: not JSON: {e}")
    return lines


def check(lines, places, deterministic, drafters, partial):
    bad = []
    for i, line in enumerate(lines):
        if line["step"] != i:
            bad.append(f"line {i + 1}: step {line['step']}, expected {i}")
    seen = collections.Counter(item["item"] for line in lines for item in line["items"])
    twice = sorted(i for i, n in seen.items() if n > 1)
    if twice:
        bad.append(f"microbatches in more than one step: {twice[:10]}")
    if not partial:
        missing = sorted(set(range(max(seen, default=-1) + 1)) - set(seen))
        if missing:
            bad.append(f"microbatches in no step: {missing[:10]}")
    epochs = collections.defaultdict(list)
    for line in lines:
        epochs[line["epoch"]].append(line)
    for epoch, steps in sorted(epochs.items()):
        samples = collections.Counter(s for line in steps for item in line["items"] for s in item["samples"])
        twice = [s for s, n in samples.items() if n > 1]
        if twice:
            bad.append(f"epoch {epoch}: samples used twice: {sorted(twice)[:10]}")
        if partial and epoch == max(epochs):
            continue
        left = collections.Counter(item["bucket"] for line in steps for item in line["items"])
        for line in steps:
            got = collections.Counter(item["bucket"] for item in line["items"])
            m = min(places, sum(left.values()))
            want = {b: n for b, n in apportion(left, m).items() if n}
            if dict(got) != want:
                bad.append(f"step {line['step']}: buckets {dict(sorted(got.items()))}, apportionment {want}")
            left -= got
            if deterministic:
                for k, item in enumerate(sorted(line["items"], key=lambda item: item["item"])):
                    if item["drafter"] != k % drafters:
                        bad.append(f"step {line['step']}: microbatch {item['item']} by drafter {item['drafter']}, expected {k % drafters}")
    return bad, len(seen)


def main(argv):
    partial = "--partial" in argv
    args = [a for a in argv if a != "--partial"]
    if len(args) != 1:
        print(__doc__.split("\n\n")[1], file=sys.stderr)
        return 2
    run = args[0]
    with open(os.path.join(run, "topology.json"), encoding="utf-8") as f:
        topo = json.load(f)
    drafters = sum(a.get("count", 1) for a in topo["actors"] if a["kind"] == "drafter")
    places = topo["train"].get("grad_accum", 1) * drafters
    lines = read_ledger(os.path.join(run, "ledger.jsonl"))
    bad, items = check(lines, places, topo["train"].get("deterministic", False), drafters, partial)
    for text in bad[:20]:
        print(f"ledger: {text}")
    if bad:
        print(f"ledger: {len(bad)} violations in {len(lines)} steps")
        return 1
    summary = os.path.join(run, "summary.json")
    if os.path.exists(summary):
        with open(summary, encoding="utf-8") as f:
            total = json.load(f)["microbatches_committed"]
        if total != items:
            print(f"ledger: {items} microbatches, summary.json says {total}")
            return 1
    print(f"ledger: {len(lines)} steps, {items} microbatches, each in exactly one step; bucket mix as apportioned")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
