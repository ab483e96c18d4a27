#!/usr/bin/env python3
"""Checks the ledger of a run with nothing but the standard library.

usage: ledger_check.py RUNDIR

Every step is there once and in order; every microbatch is in exactly one step; no sample is used twice in an epoch; and the buckets
of each step are the largest-remainder apportionment of what was left of its epoch: floor(m * left[b] / sum(left)) seats a bucket, the
seats that remain go to the largest remainders m * left[b] mod sum(left), ties to the lower bucket.
A run that was stopped, or ended by max_steps, may have an incomplete last epoch.  What was left of it is then not in the ledger: for the
first epoch run.json says it; the mix of a later one is not judged, and the last line says so.
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


def epoch_sizes(epochs, plan):
    """Buckets of the whole epoch, for each epoch that the ledger has; None where it cannot be known."""
    sizes, samples = {}, None
    for epoch, steps in sorted(epochs.items()):
        items = [item for line in steps for item in line["items"]]
        n = sum(len(item["samples"]) for item in items)
        if epoch == 0 and "microbatches_per_bucket" in plan:
            sizes[epoch] = collections.Counter({b: c for b, c in enumerate(plan["microbatches_per_bucket"]) if c})
        elif epoch < max(epochs) or n == samples or len(items) == plan.get("microbatches_per_epoch") and epoch == 0:
            sizes[epoch] = collections.Counter(item["bucket"] for item in items)
        else:
            sizes[epoch] = None
        samples = n if epoch == 0 else samples          # every epoch has all of them
    return sizes


def check_mix(steps, left, places):
    for line in steps:
        got = collections.Counter(item["bucket"] for item in line["items"])
        m = min(places, sum(left.values()))
        want = {b: n for b, n in apportion(left, m).items() if n} if m else {}
        if dict(got) != want:
            yield f"step {line['step']}: buckets {dict(sorted(got.items()))}, apportionment {want}"
        left -= got


def check_order(lines, drafters):
    """Deterministic mode: item k of a step is drafter k mod D's."""
    for line in lines:
        for k, item in enumerate(sorted(line["items"], key=lambda item: item["item"])):
            if item["drafter"] != k % drafters:
                yield f"step {line['step']}: microbatch {item['item']} by drafter {item['drafter']}, expected {k % drafters}"


def check_once(lines, epochs, completed):
    for i, line in enumerate(lines):
        if line["step"] != i:
            yield f"line {i + 1}: step {line['step']}, expected {i}"
    seen = collections.Counter(item["item"] for line in lines for item in line["items"])
    twice = sorted(i for i, n in seen.items() if n > 1)
    if twice:
        yield f"microbatches in more than one step: {twice[:10]}"
    # an epoch that was cut short may have holes: a drafter takes any ready microbatch of the bucket
    whole = seen if completed else [item["item"] for line in lines if line["epoch"] < max(epochs) for item in line["items"]]
    missing = sorted(set(range(max(whole, default=-1) + 1)) - set(seen))
    if missing:
        yield f"microbatches in no step: {missing[:10]}"
    for epoch, steps in sorted(epochs.items()):
        samples = collections.Counter(s for line in steps for item in line["items"] for s in item["samples"])
        twice = sorted(s for s, n in samples.items() if n > 1)
        if twice:
            yield f"epoch {epoch}: samples used twice: {twice[:10]}"


def read_json(run, name):
    path = os.path.join(run, name)
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as f:
        try:
            value = json.load(f)
        except ValueError as e:
            sys.exit(f"{path}: not JSON: {e}")
    if not isinstance(value, dict):
        sys.exit(f"{path}: is no JSON object: did another tool write it?")
    return value


def main(argv):
    if len(argv) != 1 or argv[0].startswith("-"):
        print(__doc__.split("\n\n")[1], file=sys.stderr)
        return 2
    run = argv[0]
    topo, plan, summary = (read_json(run, name) for name in ("topology.json", "run.json", "summary.json"))
    if not topo or not os.path.exists(os.path.join(run, "ledger.jsonl")):
        print(f"{run}: no topology.json and ledger.jsonl: not a run directory", file=sys.stderr)
        return 2
    drafters = sum(a.get("count", 1) for a in topo["actors"] if a["kind"] == "drafter")
    places = topo["train"].get("grad_accum", 1) * drafters
    lines = read_ledger(os.path.join(run, "ledger.jsonl"))
    epochs = collections.defaultdict(list)
    for line in lines:
        epochs[line["epoch"]].append(line)
    sizes = epoch_sizes(epochs, plan)
    bad = list(check_once(lines, epochs, summary.get("status") == "completed"))
    for epoch, size in sizes.items():
        if size is not None:
            bad += check_mix(epochs[epoch], size, places)
    if topo["train"].get("deterministic", False):
        bad += check_order(lines, drafters)
    items = sum(len(line["items"]) for line in lines)
    if summary and summary["microbatches_committed"] != items:
        bad.append(f"{items} microbatches, summary.json says {summary['microbatches_committed']}")
    for text in bad[:20]:
        print(f"ledger: {text}")
    if bad:
        print(f"ledger: {len(bad)} violations in {len(lines)} steps")
        return 1
    unknown = [epoch for epoch, size in sizes.items() if size is None]
    print(f"ledger: {len(lines)} steps, {items} microbatches, each in exactly one step; bucket mix as apportioned"
          + (f" (epoch {unknown[0]} is incomplete: its mix is not judged)" if unknown else ""))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (KeyError, TypeError, AttributeError) as e:
        sys.exit(f"{sys.argv[1]}: a file of the run has not the keys or types that millrace writes ({type(e).__name__}: {e})")
