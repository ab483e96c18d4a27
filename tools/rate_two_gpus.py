#!/usr/bin/env python3
"""Rates at the shape of a large target on two GPUs, against what they are made of; standard library only.

usage: rate_two_gpus.py BIN_DIR OUT_DIR PART [--config DIR | --demo] [--warm 4] [--steps 20] [--kills 2]
  alone   the target's forward and the drafter's step by themselves, at the microbatch of the runs
  apart   1 target on cuda:0, 1 drafter on cuda:1
  one     target and drafter on cuda:0
  p2p, nccl   a target and a drafter on each of two GPUs; then SIGKILLs of a drafter
  table   what the others have left in OUT_DIR, as lines "figure<tab>name<tab>value<tab>goal<tab>met"
Microbatches are two sequences of about 3072 tokens, two of them a step and drafter; weights are random, data are synthetic.  A run is measured
from --warm on for --steps steps and then stopped, without a checkpoint.  --demo takes the demo's shape and data: to try this out.
"""
import argparse
import json
import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import sys
import time
import urllib.request

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "test"))
sys.dont_write_bytecode = True
import e2e_gpu                                                                             # noqa: E402
import e2e_runtime as e2e                                                                  # noqa: E402
from e2e_gpu_drafters import kill_at, restarts, row, wait_for_claim                        # noqa: E402
from e2e_two_gpus import DEATH, PENDING_S, Commits, figure, rebuilt, spread                # noqa: E402

SEQS, TOKENS, ACCUM = 2, 3072, 2
ACTORS = {"apart": (["cuda:0"], ["cuda:1"]), "one": (["cuda:0"], ["cuda:0"]), "p2p": (["cuda:0", "cuda:1"],) * 2, "nccl": (["cuda:0", "cuda:1"],) * 2}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Rated(e2e_gpu.Gpu):
    def __init__(self, o):
        super().__init__("rate-" + o.part)
        with open(os.path.join(ROOT, "conf", "demo-two-gpus.json"), encoding="utf-8") as f:
            self.data = json.load(f)
        targets, draft = ACTORS[o.part]
        self.port, d = free_port(), self.data
        d["run"].update(name=self.name, dir=self.dir)
        d["target"]["checkpoint"] = os.path.join(ROOT, "demo", "target")
        d["data"]["train"] = os.path.join(ROOT, "demo", "train.safetensors")
        d["train"].update(grad_accum=ACCUM, checkpoint_every_steps=0, reduce="nccl" if o.part == "nccl" else "p2p")
        d["actors"] = [{"kind": "feeder"}, *({"kind": "target", "device": x} for x in targets), *({"kind": "drafter", "device": x} for x in draft)]
        d["metrics"] = {"listen": f"127.0.0.1:{self.port}"}
        if not o.demo:
            self.large(o)
        self.save()

    def large(self, o):
        d, draft = self.data, len(ACTORS[o.part][1])
        rows = SEQS * ACCUM * draft * (o.warm + o.steps + 20 * (o.kills + 1))
        d["target"].update(checkpoint=f"random:{os.path.abspath(o.config)}?seed=1", layers=[1, 9, 17, 25, 33])
        d["drafter"].update(layers=5, block_size=16, anchors=512, mask_token_id=151669, init_std=0.02)
        d["data"].update(train=f"synthetic:{rows}?min={TOKENS - 12}&max={TOKENS}&seed=1", max_tokens=TOKENS, buckets=[TOKENS],
                         token_budget=SEQS * TOKENS)
        d["train"].update(lr=1e-4)

    def metrics(self):
        """{name: value} of the endpoint, actors and waits included."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as f:
            lines = f.read().decode().splitlines()
        return {k: float(v) for k, v in (x.rsplit(" ", 1) for x in lines if not x.startswith("#"))}

    def steps(self):
        with open(os.path.join(self.dir, "metrics", "steps.jsonl"), encoding="utf-8") as f:
            return [json.loads(x) for x in f if x.endswith("\n")]


def shares(a, b, drafter):
    """Milliseconds a step of one drafter between two looks at the metrics: at work, waiting by reason, and the rest, which is the sum itself
    (and, in the first steps, joining the group)."""
    steps = b["millrace_steps"] - a["millrace_steps"]

    def per_step(name):
        return 1e3 * (b.get(name, 0) - a.get(name, 0)) / steps

    out = {"step": per_step("millrace_wall_seconds"), "busy": per_step(f'millrace_actor_busy_seconds{{actor="{drafter}"}}')}
    waits = {m.group(1): per_step(k) for k in b for m in [re.match(rf'millrace_actor_wait_seconds{{actor="{drafter}",reason="(\w+)"}}', k)] if m}
    out["waits"] = {k: v for k, v in waits.items() if v >= 0.05}
    out["rest"] = out["step"] - out["busy"] - sum(waits.values())
    return out


def steady(r, commits, o):
    commits.reach(o.warm, 100)
    begin, a = len(commits.at), r.metrics()
    commits.reach(begin + o.steps, 100)
    b, lines = r.metrics(), r.steps()
    end = len(lines)
    gaps = [y["wall_s"] - x["wall_s"] for x, y in zip(lines[begin - 1:end - 1], lines[begin:end])]
    drafters = [x["name"] for x in r.status()["actors"] if x["name"].startswith("drafter/")]
    return {"steps": len(gaps), "tokens_per_s": sum(x["tokens"] for x in lines[begin:end]) / sum(gaps), "step_ms": 1e3 * statistics.median(gaps),
            "worst_ms": 1e3 * max(gaps), "first_step_s": lines[0]["wall_s"], "drafters": {d: shares(a, b, d) for d in drafters}}


def deaths(r, commits, o, step_s):
    """SIGKILLs of drafters, each at a random moment of a step: seconds to the next claim, to the next commit, and what the survivor did."""
    rnd, out = random.Random(1), {"claim": [], "commit": [], "joined": [], "rebuild": []}
    for k in range(o.kills):
        name, peer = f"drafter/{(k + 1) % 2}", f"drafter/{k % 2}"
        time.sleep(step_s * (1 + rnd.random()))
        old, wall = row(r, name)["incarnation"], time.time()
        mono = kill_at(r, name)
        e2e.need(mono, f"{name} is not there")
        wait_for_claim(r, name, old)
        log = r.log()
        died = next(e["t"] for e in log if e["actor"] == name and e["t"] > wall - 0.002 and re.search(DEATH, e["msg"]))
        goes_on = e2e.wait_until(lambda died=died: commits.next_after(died + PENDING_S), 60, "a step after the death")
        time.sleep(0.2)                                     # the supervisor looks for the claim's line a few times a second
        out["claim"] += [t for t, _ in restarts(r, [(mono, name)])]
        out["commit"].append(goes_on - wall)
        new = rebuilt(r.log(), peer, wall, goes_on + 0.01)
        if new:
            out["joined"].append(new[0] - wall)
            out["rebuild"].append(new[1])
    return out


def measure(o):
    r = Rated(o)
    try:
        r.start()
        commits = Commits(r)
        found = steady(r, commits, o)
        if len(found["drafters"]) > 1 and o.kills:
            found["deaths"] = deaths(r, commits, o, found["step_ms"] * 1e-3)
        commits.stop()
        subprocess.run([e2e.MILLRACE, "stop", r.name, "--now"], capture_output=True, check=False)
        r.wait(30)
        for name in ("log.jsonl", "metrics/steps.jsonl"):
            shutil.copy(os.path.join(r.dir, name), os.path.join(o.out, f"{o.part}-{os.path.basename(name)}"))
        return found
    except Exception:
        print(r.text()[-3000:])
        for e in r.log()[-30:] if os.path.exists(os.path.join(r.dir, "log.jsonl")) else ():
            print(e["t"], e["actor"], e["msg"])
        raise
    finally:
        r.close()


def bench(o, *args):
    """The last JSON that the program printed."""
    p = subprocess.run([os.environ.get("MILLRACE_ACTOR", os.path.join(o.bin, "millrace-actor")), *args, "--device", "cuda:0", "--json"],
                       capture_output=True, text=True, check=False)
    if p.returncode:
        raise RuntimeError(f"{args}: exit code {p.returncode}: {p.stderr}{p.stdout}")
    return json.loads(p.stdout[p.stdout.index("{"):])


def alone(o):
    """Tokens/s of each stage by itself.  The drafter's is of a step of ACCUM microbatches."""
    config, tokens, seconds, shape = o.config, SEQS * TOKENS, "7", []
    if o.demo:
        config, tokens, seconds, shape = os.path.join(ROOT, "demo", "target"), 512, "1", ["--layers", "2", "--block", "8", "--anchors", "32"]
    t = bench(o, "bench-target", "--config", config, "--tokens", str(tokens), "--mix", "3072", "--seconds", seconds, "--rounds", "1")
    d = bench(o, "bench-drafter", "--config", config, "--tokens", str(tokens // SEQS), "--seqs", str(SEQS), *shape, "--seconds", seconds,
              "--rounds", "1")
    mix, s = t["mixes"][0], d["sustained"]
    forward = mix["sustained"]["alone_ms"]
    step = ACCUM * s["forward_backward_ms"] + s["sum_ms"] + s["apply_ms"] + s["zero_ms"]
    return {"target_ms": forward, "drafter_step_ms": step, "target": mix["tokens"] / forward * 1e3, "drafter": ACCUM * tokens / step * 1e3}


# ---- table --------------------------------------------------------------------------------------------------------------------------


def ratio(what, got, base, base_name):
    if got and base:
        x = got["tokens_per_s"] / base
        figure(what, f"{got['tokens_per_s'] / 1e3:.2f}k tokens/s = {x:.3f} of {base_name} ({base / 1e3:.2f}k)", ">= 0.95", x >= 0.95)


def table(found):
    stages, apart, single = found.get("alone"), found.get("apart"), found.get("one")
    if stages:
        slow = min(("target", "drafter"), key=stages.get)
        figure("target alone, drafter alone", f"{stages['target'] / 1e3:.2f}k and {stages['drafter'] / 1e3:.2f}k tokens/s")
        ratio("1 target + 1 drafter, a GPU each", apart, stages[slow], f"the {slow} alone")
        in_turn = 1 / (1 / stages["target"] + 1 / stages["drafter"])
        ratio("target + drafter on one GPU", single, in_turn, "both in turn")
    for reduce in ("p2p", "nccl"):
        two = found.get(reduce)
        if not two:
            continue
        ratio(f"2 x (target + drafter), {reduce}", two, single and 2 * single["tokens_per_s"], "twice one GPU")
        figure(f"step, {reduce}", f"median {two['step_ms']:.0f} ms, worst {two['worst_ms']:.0f} ms of {two['steps']}")
        for name, x in two["drafters"].items():
            waits = ", ".join(f"{k} {v:.1f}" for k, v in sorted(x["waits"].items(), key=lambda kv: -kv[1]))
            figure(f"{name}, {reduce}: ms a step", f"sum {x['rest']:.1f}, work {x['busy']:.0f}, waits: {waits or 'none'}")
        d = two.get("deaths")
        if d:
            figure(f"8B: SIGKILL of a drafter to its next claim, {reduce}", spread(d["claim"]))
            figure(f"8B: SIGKILL of a drafter to the next commit, {reduce}", spread(d["commit"]) + f" (a step: {two['step_ms'] * 1e-3:.2f} s)")
        if d and d["rebuild"]:
            figure("8B: SIGKILL to the survivor's new communicator", spread(d["joined"]))
            figure("8B: abort and rebuild in the survivor", spread(d["rebuild"]), "<= 2 s", max(d["rebuild"]) <= 2)


def main():
    p = argparse.ArgumentParser(usage=__doc__)
    p.add_argument("bin"), p.add_argument("out"), p.add_argument("part", choices=[*ACTORS, "alone", "table"])
    p.add_argument("--config", default=os.path.join(ROOT, "conf", "shapes", "qwen3-8b")), p.add_argument("--demo", action="store_true")
    p.add_argument("--warm", type=int, default=4), p.add_argument("--steps", type=int, default=20), p.add_argument("--kills", type=int, default=2)
    o = p.parse_args()
    o.bin = e2e.BIN = os.path.abspath(o.bin)
    e2e.MILLRACE = os.path.join(o.bin, "millrace")
    os.makedirs(o.out, exist_ok=True)
    if o.part == "table":
        found = {}
        for part in (*ACTORS, "alone"):
            path = os.path.join(o.out, part + ".json")
            if os.path.exists(path):
                with open(path, encoding="utf-8") as f:
                    found[part] = json.load(f)
        table(found)
        return
    found = alone(o) if o.part == "alone" else measure(o)
    with open(os.path.join(o.out, o.part + ".json"), "w", encoding="utf-8") as f:
        json.dump(found, f)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
