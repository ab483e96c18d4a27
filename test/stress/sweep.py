#!/usr/bin/env python3
"""Kills a whole run at every named fault point, in every role; standard library only.

usage: sweep.py BIN_DIR [--passages 1,2,5] [--only TEXT] [--jobs N]

First, traced runs (undisturbed, resumed, with deaths) show which points each role passes.  Then, for each (role, point, passage), a small
run with synthetic actors: the process dies at that passage; an actor is restarted by the supervisor, a dead supervisor by --resume.  After
each: exit code 0, every microbatch in exactly one ledger line, weights as the ledger says, nothing left in /dev/shm.
A point in the source that no role passes fails the sweep, unless it is in ELSEWHERE with its reason.  Exit code 77: built without points.
"""
import concurrent.futures
import os
import random
import re
import signal
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
sys.path.insert(0, HERE)
import e2e_runtime as e2e   # noqa: E402
import exact                # noqa: E402

ROLES = ("feeder", "target", "drafter", "supervisor")
# Deaths that leave something to recover: in mode "chain" one of these comes first, so that the supervisor is at work on it.
CHAIN = (("feeder", "feeder.item.claimed", 5), ("feeder", "feeder.cursor.moved", 5), ("feeder", "ipc.item.queued", 5),
         ("target", "ipc.item.extracting", 5), ("target", "ipc.slab.assigned", 5), ("target", "ipc.item.ready", 5),
         ("drafter", "ipc.place.taken", 5), ("drafter", "drafter.item.claimed", 5), ("drafter", "drafter.place.done", 5),
         ("drafter", "drafter.sum.done", 3), ("drafter", "drafter.apply.done", 3), ("drafter", "ckpt.model.written", 1))
# Points that a healthy or damaged run on the cpu backend cannot pass, and what passes them instead.
ELSEWHERE = {
    "ipc.arena.register": "before the actors exist, or by a keeper (cuda)",
    "ipc.recover.arena": "loss of a keeper (cuda): test_ipc_recover",
    "ipc.recover.taken_back": "loss of a keeper (cuda): test_ipc_recover",
    "ipc.item.requeued": "loss of a keeper (cuda), or a target's death: test_ipc_recover",
    "drafter.item.requeued": "loss of a keeper (cuda)",
    "ipc.ring.full": "a ring has room for every live cell; test_ipc_ring fills one by hand",
    "ipc.item.drafting_pos": "deterministic mode",
    "ipc.arena.seal": "weights in a keeper (cuda): test_ipc_arena, e2e_gpu",
    "weights.load.begin": "weights in a keeper (cuda): e2e_gpu",
    "weights.loaded": "weights in a keeper (cuda): e2e_gpu",
    "weights.sealed": "weights in a keeper (cuda): e2e_gpu",
    "keeper.arena.allocated": "a keeper (cuda): e2e_gpu",
    "keeper.arena.registered": "a keeper (cuda): e2e_gpu",
    "drafter.next.claimed": "a drafter that fetches ahead (cuda): e2e_gpu_drafters",
    "reduce.id.made": "reduction over NCCL (cuda)",
    "reduce.id.known": "reduction over NCCL (cuda)",
    "reduce.joining": "reduction over NCCL (cuda)",
    "reduce.issued": "reduction over NCCL (cuda)",
    "ipc.place.give": "a race of two drafters for one item: test_ipc_step",
    "ipc.ring.stale": "a cell whose item was claimed by another way: test_ipc_ring",
}


def source_points():
    names = set()
    for room in ("ipc", "actors", "runtime"):
        folder = os.path.join(HERE, "..", "..", room)
        for name in os.listdir(folder):
            if name.endswith((".c", ".h")):
                with open(os.path.join(folder, name), encoding="utf-8") as f:
                    names.update(re.findall(r'MR_POINT\("([^"]+)"\)', f.read()))
    return names


def make(tag, mode, deterministic):
    r = e2e.Run(tag, rows=160, us=800 if mode == "quiet" else 2500)
    r.data["train"]["deterministic"] = deterministic
    r.data["train"]["checkpoint_every_steps"] = 6
    r.data["restart"].update(max=100, backoff_ms=10)      # on a slow machine the kills come faster than the microbatches
    r.save()
    return r


def disturb(r, seed):
    """Kills random actors until the run is over, so that recovery is at work when the point is passed."""
    rnd = random.Random(seed)
    while r.proc.poll() is None:
        time.sleep(rnd.uniform(0.02, 0.06))
        e2e.kill_one(r, rnd)


def start(r, mode, seed, env):
    """quiet: nothing else dies.  deaths: random actors die all the time.  resume: the second life of a run whose supervisor was killed."""
    if mode == "resume":
        r.start()
        e2e.wait_until(lambda: r.step() >= 8 or r.proc.poll() is not None, 30, "step 8")
        r.proc.kill()
        r.proc.wait()
        r.start("--resume", env=env)
    else:
        r.start(env=env)
    if mode == "deaths":
        disturb(r, seed)


def fault(role, point, passage, mode, chain):
    """MR_FAULT: the fault under test is the first of them, so its mark is FILE.0."""
    spec = f"{point}:{passage}:{role}"
    return spec if mode != "chain" else spec + ",{1}:{2}:{0}".format(*CHAIN[chain])


def finish(r):
    """The run to its end, through --resume when the supervisor died.  Then everything must be exact."""
    for _ in range(4):
        if r.wait(60) != -signal.SIGKILL:
            break
        r.start("--resume")
    r.must_end(0)
    r.must_be_exact()
    wrong = exact.weights_violation(r.dir)
    e2e.need(not wrong, wrong)


def trace(mode, deterministic, seed):
    r = make(f"trace-{mode}{int(deterministic)}{seed}", mode, deterministic)
    path = os.path.join(r.tmp, "trace")
    try:
        env = {"MR_FAULT_TRACE": path}
        if mode == "chain":
            env.update(MR_FAULT="{1}:{2}:{0}".format(*CHAIN[seed]), MR_FAULT_ONCE=path + "-once")
        start(r, mode, seed, env)
        finish(r)
        if not os.path.exists(path):
            return None
        with open(path, encoding="utf-8") as f:
            return {(line.split()[0].split("/")[0], line.split()[1]) for line in f}
    finally:
        r.close()


def attempt(role, point, passage, mode, deterministic, seed):
    tag = f"{role}-{point}-{passage}".replace(".", "-").replace("_", "-")[:40]
    r = make(tag, mode, deterministic)
    once = os.path.join(r.tmp, "once")
    try:
        start(r, mode, seed, {"MR_FAULT": fault(role, point, passage, mode, seed), "MR_FAULT_ONCE": once})
        finish(r)
        return ("ok" if os.path.exists(once + ".0") else "unreached"), ""
    except AssertionError as e:
        return "FAILED", str(e)[-1500:]
    finally:
        r.close()


def one(role, point, passage, mode, deterministic, seed):
    """(verdict, text): "ok", "unreached" (three runs were over before that passage), or "FAILED"."""
    for _ in range(3):
        verdict, text = attempt(role, point, passage, mode, deterministic, seed)
        if verdict != "unreached":
            break
    return verdict, text


def plan(passages, only):
    """The jobs, and the points that were reached; each (role, point) in the first mode that reaches it."""
    jobs, reached = [], set()
    modes = [("quiet", d, 0) for d in (False, True)] + [("resume", d, 0) for d in (False, True)]
    modes += [("chain", False, k) for k in range(len(CHAIN))] + [("deaths", d, 1) for d in (False, True)]
    for mode, deterministic, seed in modes:
        seen = trace(mode, deterministic, seed)
        if seen is None:
            return None, None
        for role, point in sorted(seen):
            if (role, point) in reached or role not in ROLES:
                continue
            reached.add((role, point))
            jobs += [(role, point, n, mode, deterministic, seed) for n in passages]
    return [j for j in jobs if only in f"{j[0]} {j[1]}"], {point for _, point in reached}


def main(argv):
    passages, only, jobs = [1], "", 3
    args = argv[1:]
    while len(args) > 1:
        value = args.pop()
        key = args.pop()
        if key == "--passages":
            passages = [int(x) for x in value.split(",")]
        elif key == "--only":
            only = value
        elif key == "--jobs":
            jobs = int(value)
        else:
            args = []
    if len(args) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    e2e.BIN = os.path.abspath(args[0])
    e2e.MILLRACE = os.path.join(e2e.BIN, "millrace")
    todo, reached = plan(passages, only)
    if todo is None:
        print("SKIP: built without fault points")
        return 77
    count, bad = {}, 0
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for job, (verdict, text) in zip(todo, pool.map(lambda j: one(*j), todo)):
            count[verdict] = count.get(verdict, 0) + 1
            if verdict != "ok":
                bad += verdict == "FAILED"
                print(f"{job[0]} {job[1]} passage {job[2]}: {verdict}\n{text}", flush=True)
    missing = sorted(source_points() - reached - set(ELSEWHERE)) if not only else []
    for name in missing:
        print(f"{name}: no role passes it")
    for name, why in sorted(ELSEWHERE.items()):
        if name not in reached:
            print(f"{name}: skipped ({why})")
    print(f"sweep: {len(todo)} kills over {len(reached)} points: " + ", ".join(f"{n} {v}" for v, n in sorted(count.items())))
    return 1 if bad or missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
