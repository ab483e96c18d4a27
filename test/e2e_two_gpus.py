#!/usr/bin/env python3
"""Whole runs on two GPUs; standard library only.

usage: e2e_two_gpus.py BIN_DIR CASE [FAKE_ACTOR]      exit 0 = passed, 1 = failed, 77 = cannot run here
With FAKE_ACTOR (test/fake_cuda.c) every machine can run it; without, two GPUs are needed.  MR_KILLS, MR_STEPS, MR_PAUSE and MR_SEED vary the
kills.  Lines that begin with "figure" and a tab (name, value, goal, met or not) are for tables; no case fails because of a time.
"""
import array
import json
import os
import random
import re
import signal
import statistics
import struct
import subprocess
import sys
import threading
import time

import e2e_gpu
import e2e_runtime as e2e
from e2e_gpu import kill
from e2e_gpu_drafters import All, distance, drafters, finish, parameters, restarts, row, same, wait_for_claim
from e2e_runtime import HERE, need, wait_until

BOTH = ("cuda:0", "cuda:1")
DEATH = r"^incarnation \d+ (?!acknowledged)"
PENDING_S = 0.003            # a step that was committed before a death may get its ledger line so much after it


class Two(All):
    """Targets and drafters on two GPUs, deterministic."""

    def __init__(self, tag, reduce="p2p", targets=BOTH, draft=BOTH, restart=None, **train):
        super().__init__(tag, draft=draft, reduce=reduce, **train)
        self.data["actors"] = [{"kind": "feeder"}, *({"kind": "target", "device": d} for d in targets), *drafters(*draft)]
        self.data["restart"].update(restart or {})
        self.save()

    def start(self, *args, env=None):
        return super().start(*args, env={"FAKE_CUDA_DEVICES": "2", **(env or {})})

    def deaths(self, name):
        return self.lines(DEATH, name)

    def close(self):
        """Also of actors that stand stopped: only SIGKILL ends those."""
        for pid in self.pids().values() if self.proc and self.proc.poll() is None else ():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        super().close()


class Commits(threading.Thread):
    """When each ledger line came, on the clock of log.jsonl."""

    def __init__(self, r):
        super().__init__(daemon=True)
        self.r, self.at, self.over = r, [], False
        self.path = os.path.join(r.dir, "ledger.jsonl")
        self.start()

    def run(self):
        seen = 0
        while not self.over:
            if os.path.exists(self.path) and os.path.getsize(self.path) > seen:
                with open(self.path, "rb") as f:
                    f.seek(seen)
                    new = f.read()
                seen += len(new)
                self.at += [time.time()] * new.count(b"\n")
            time.sleep(0.001)

    def reach(self, step, seconds=240):
        wait_until(lambda: len(self.at) >= step or self.r.proc.poll() is not None, seconds, f"step {step}")
        need(self.r.proc.poll() is None, f"the run is over before step {step}\n{self.r.text()[-3000:]}")

    def next_after(self, t):
        return next((x for x in list(self.at) if x > t), None)

    def stop(self):
        self.over = True
        self.join()


def real(on_gpu, over_fake):
    return over_fake if e2e_gpu.FAKE else on_gpu


def figure(name, value, goal="-", met=None):
    print("figure", name, value, goal, {None: "", True: "met", False: "NOT MET"}[met], sep="\t")


def spread(seconds):
    x = sorted(seconds)
    return f"median {statistics.median(x):.2f} s, worst {x[-1]:.2f} s of {len(x)}" if x else "none seen"


def undisturbed(tag, steps, **kw):
    r = Two(tag, max_steps=steps, **kw)
    try:
        r.start()
        blob = finish(r, steps)
        need(r.summary()["restarts"] == 0, f"{r.summary()}")
        return blob
    finally:
        r.close()


# ---- no deaths ----------------------------------------------------------------------------------------------------------------------


def case_conf():
    """conf/demo-two-gpus.json is accepted, and is what it says."""
    root = os.path.dirname(HERE)
    env = {**os.environ, "FAKE_CUDA_DEVICES": "2"}
    p = subprocess.run([e2e.MILLRACE, "check", os.path.join(root, "conf", "demo-two-gpus.json")], capture_output=True, text=True, check=False,
                       cwd=root, env=env)
    need(p.returncode == 0 and "cuda:0" in p.stdout and "cuda:1" in p.stdout, f"{p}")


def case_apart():
    """The target on one GPU, the drafter on the other: hidden states are pulled across, and are the ones that are read in place."""
    steps = real(60, 10)
    kw = {"targets": ("cuda:0",), "draft": ("cuda:1",)}
    blob = undisturbed("apart", steps, **kw)
    same(blob, undisturbed("again", steps, **kw), "target and drafter apart, twice")
    same(blob, undisturbed("near", steps, targets=("cuda:0",), draft=("cuda:0",)), "target and drafter apart, and on one GPU")


def moments(blob):
    """All exp_avg of a trainer.safetensors."""
    n = struct.unpack("<Q", blob[:8])[0]
    out = array.array("f")
    for name, t in sorted(json.loads(blob[8:8 + n]).items()):
        if name.endswith(".exp_avg"):
            begin, end = t["data_offsets"]
            out.frombytes(blob[8 + n + begin:8 + n + end])
    return out


def grads(reduce, wire, least, most):
    """Of one step of four microbatches, exp_avg is (1 - beta1) times the clipped gradient: the reduction, before AdamW's division makes
    large of what is small.  One drafter that accumulates all four is what it must be, but for rounding."""
    want = moments(undisturbed("one", 1, targets=("cuda:0",), draft=("cuda:0",), grad_accum=4))
    got = moments(undisturbed("two", 1, reduce=reduce, grad_accum=2, reduce_wire=wire))
    d = distance(got, want)
    figure(f"gradient of 2 GPUs against 1, {reduce} {wire}", f"relative distance {d:.1e}", f"< {most:.0e}", d < most)
    need(least <= d < most, f"{reduce}, {wire}: relative distance of the gradients {d:.2e}, allowed are {least:.0e} to {most:.0e}")


def weights(reduce):
    steps = 12
    d = distance(parameters(undisturbed("two", steps, reduce=reduce)), parameters(undisturbed("one", steps, targets=("cuda:0",), draft=("cuda:0",))))
    figure(f"weights after {steps} steps, {reduce} fp32", f"relative distance {d:.1e}", "< 1e-04", d < 1e-4)
    need(d < 1e-4, f"two GPUs against one with twice the grad_accum: relative distance of the weights {d:.1e}")


def case_grads_p2p():
    """fp32 sums in another order: 2^-24 an addition."""
    grads("p2p", "fp32", 0, 1e-5)
    weights("p2p")


def case_grads_nccl():
    grads("nccl", "fp32", 0, 1e-5)
    weights("nccl")


def case_grads_bf16():
    """Each rank's sum and the total are rounded to 8 bits: 2^-9 of each element at most, three times.  Less than 1e-4 were no bf16."""
    if e2e_gpu.FAKE:
        print("skipped: the fake device sums f32 only")
        return 77
    grads("nccl", "bf16", 1e-4, 1e-2)
    return 0


# ---- kills --------------------------------------------------------------------------------------------------------------------------


class Strikes:
    """Kills actors of a live run, and says afterwards what each death cost."""

    def __init__(self, r, rnd):
        self.r, self.rnd = r, rnd
        self.by_us, self.keepers, self.alone = {}, [], []

    def count(self):
        return sum(self.by_us.values())

    def hit(self, name):
        """True when there was one to kill."""
        at = (time.monotonic(), time.time())
        if not kill(self.r, name):
            return None
        self.by_us[name] = self.by_us.get(name, 0) + 1
        return at

    def incarnation(self, name):
        return row(self.r, name)["incarnation"]

    def single(self, name):
        old = self.incarnation(name)
        at = self.hit(name)
        if at:
            self.alone.append((name, *at))
            wait_for_claim(self.r, name, old)

    def quick(self):
        self.hit(f"drafter/{self.rnd.randrange(2)}")

    def both(self):
        first = self.rnd.randrange(2)
        old = [self.incarnation(f"drafter/{k}") for k in range(2)]
        self.hit(f"drafter/{first}")
        time.sleep(self.rnd.random() * 0.1)
        self.hit(f"drafter/{1 - first}")
        for k in range(2):
            wait_for_claim(self.r, f"drafter/{k}", old[k])

    def keeper(self):
        """Its drafter's state comes from the peer.  The other device's keeper must live until then: with both goes the state."""
        k, pattern = self.rnd.randrange(2), r"restored from drafter"
        old, seen = self.incarnation(f"drafter/{k}"), len(self.r.lines(pattern))
        if self.hit(f"keeper/{k}"):
            self.keepers.append(k)
            wait_until(lambda: len(self.r.lines(pattern)) > seen or self.r.proc.poll() is not None, 60, f"drafter/{k} has its peer's state")
            wait_for_claim(self.r, f"drafter/{k}", old)

    def strike(self, how):
        if how in ("quick", "both", "keeper"):
            getattr(self, how)()
        else:
            self.single(f"{how}/{self.rnd.randrange(2)}")


def spell(k, n, rnd):
    """What the k-th of n strikes is: each kind at least once, mostly drafters."""
    fixed = {1: "both", 2: "target", 3: "quick", n - 2: "keeper"}
    return fixed.get(k) or rnd.choices(["drafter", "quick", "both", "target", "keeper"], [10, 2, 2, 4, 1])[0]


def rebuilt(log, peer, begin, end):
    """When the survivor had its next communicator, and how long it was busy with the old and the new one: (time, seconds), or None."""
    lines = [(e["t"], *m.groups()) for e in log if e["actor"] == peer and begin <= e["t"] <= end
             for m in [re.search(r"(given up|group of epoch).*?([0-9.]+) ms", e["msg"])] if m]
    joined = [t for t, what, _ in lines if what != "given up"]
    return (joined[0], sum(float(ms) for _, _, ms in lines) * 1e-3) if joined else None


def cost(r, s, commits, reduce):
    """Of deaths of one actor alone.  A step of a deterministic run has microbatches of each drafter: the first commit after the claim is the
    first that the new incarnation is part of."""
    log, again, commit, new = r.log(), {"drafter": [], "target": []}, [], []
    for name, mono, wall in s.alone:
        claim = next((t for t, _ in restarts(r, [(mono, name)])), None)
        if claim is None:
            continue                                        # the run was over first
        again[name.split("/", maxsplit=1)[0]].append(claim)
        goes_on = commits.next_after(wall + claim)
        if name.startswith("drafter/") and goes_on:
            commit.append(goes_on - wall)
            new.append((wall, rebuilt(log, "drafter/1" if name == "drafter/0" else "drafter/0", wall, goes_on)))
    figure(f"SIGKILL of a drafter to its next claim, {reduce}", spread(again["drafter"]))
    figure(f"SIGKILL of a drafter to the next commit, {reduce}", spread(commit))
    figure(f"SIGKILL of a target to its next claim, {reduce}", spread(again["target"]))
    new = [(at, x) for at, x in new if x]
    if reduce == "nccl":
        figure("SIGKILL to the survivor's new communicator", spread([x[0] - at for at, x in new]))
        worst = max((x[1] for _, x in new), default=0)
        figure("abort and rebuild in the survivor", spread([x[1] for _, x in new]), "<= 2 s", worst <= 2 if new else None)


def must_have_lived(r, s):
    """Targets die of our kills, and with their keeper; of nothing else."""
    for k in range(2):
        name = f"target/{k}"
        allowed = s.by_us.get(name, 0) + s.keepers.count(k)
        need(len(r.deaths(name)) <= allowed, f"{name} died {len(r.deaths(name))} times, {allowed} of them ours: {r.deaths(name)}")


def kills(reduce):
    seed = int(os.environ.get("MR_SEED", time.time_ns() % 1000000))
    print(f"MR_SEED={seed}")
    rnd = random.Random(seed)
    n = int(os.environ.get("MR_KILLS", real("30", "12")))
    steps, tail = int(os.environ.get("MR_STEPS", n * real(20, 3))), real(60, 6)
    every = max(4, steps // 6)
    want = undisturbed("calm", steps, reduce=reduce, checkpoint_every_steps=every)
    r = Two("kills", reduce, max_steps=steps, checkpoint_every_steps=every, restart={"max": 20})
    try:
        r.start()
        commits = Commits(r)
        s = Strikes(r, rnd)
        for k in range(n):
            commits.reach(1 + k * (steps - tail) // n)
            time.sleep(rnd.random() * float(os.environ.get("MR_PAUSE", real("0.05", "0.2"))))
            s.strike(spell(k, n, rnd))
        need(s.count() >= n, f"only {s.count()} kills")
        same(finish(r, steps), want, f"{s.count()} kills, {reduce}")
        commits.stop()
        must_have_lived(r, s)
        figure(f"SIGKILLs, weights as undisturbed, {reduce}", f"{s.count()}, {len(s.keepers)} of keepers; {r.summary()['restarts']} restarts")
        cost(r, s, commits, reduce)
    finally:
        r.close()


def case_kills_p2p():
    kills("p2p")


def case_kills_nccl():
    kills("nccl")


# ---- deaths and stops at named points -----------------------------------------------------------------------------------------------

# Faults of one run each; the N-th passage counts within one incarnation, so that they come one after the other.
POINTS = {
    "p2p": (("drafter.reduce.entered:1:drafter", "reduce.summed:4:drafter/1", "drafter.sum.done:7:drafter/0", "drafter.reduced.set:7:drafter/1"),
            ("reduce.summed:2:drafter/0", "drafter.sum.done:4:drafter/1", "drafter.apply.done:5:drafter/0", "drafter.applied.set:5:drafter/1")),
    "nccl": (("reduce.id.made:1:drafter/0", "reduce.issued:3:drafter/1", "drafter.sum.done:6:drafter/0", "drafter.apply.done:6:drafter/1"),
             ("reduce.joining:1:drafter/0", "reduce.joining:2:drafter/1", "reduce.issued:4:drafter/0", "reduce.summed:5:drafter/1"),
             ("drafter.sum.done:2:drafter/1", "reduce.summed:4:drafter/0", "drafter.reduced.set:4:drafter/1", "drafter.apply.done:4:drafter/0")),
}


def points(reduce):
    """A rank dies while the group is made, joined or summing, or between sum and step: the other one goes on with the next, to the same bits."""
    steps = 24
    want = undisturbed("calm", steps, reduce=reduce, checkpoint_every_steps=8)
    for faults in POINTS[reduce]:
        r = Two("point", reduce, max_steps=steps, checkpoint_every_steps=8)
        try:
            once = os.path.join(r.tmp, "once")
            r.start(env={"MR_FAULT": ",".join(faults), "MR_FAULT_ONCE": once})
            same(finish(r, steps), want, ", ".join(faults))
            came = [f for k, f in enumerate(faults) if os.path.exists(f"{once}.{k}")]
            if not came:
                print("skipped: built without fault points")
                return 77
            need(len(came) == len(faults), f"of {faults} only {came} came")
            # A survivor that the library holds leaves as well, after its deadline.
            need(r.summary()["restarts"] >= len(faults), f"{faults}: {r.summary()}")
            need(not r.deaths("target/0") and not r.deaths("target/1"), f"a target died: {r.deaths('target/0')}, {r.deaths('target/1')}")
            print(f"{', '.join(faults)}: {r.summary()['restarts']} restarts, the same bits")
        finally:
            r.close()
    return 0


def case_points_p2p():
    return points("p2p")


def case_points_nccl():
    return points("nccl")


def names(r, who):
    """Warnings that say that `who` was not there: of others, with its name, or of the supervisor, under its name."""
    words = re.compile(r"stopped|not there|not come|missing|late")
    return [f"{e['actor']}: {e['msg']}" for e in r.log() if e["level"] in ("warn", "error") and
            (who in e["msg"] and words.search(e["msg"]) or e["actor"] == who and "killing it" in e["msg"])]


def hung(reduce, faults):
    """A rank is stopped inside or beside the sum for longer than restart.hang_s: it is replaced, its peer lives (a real library may hold it, and
    then it leaves too), the run completes, and the log names who was not there."""
    steps, hang_s = 12, real(5, 4 * e2e.SLOW)
    want = undisturbed("calm", steps, reduce=reduce)
    for fault in faults:
        who = fault.rsplit(":", 1)[1]
        r = Two("hung", reduce, max_steps=steps, restart={"hang_s": hang_s})
        try:
            once = os.path.join(r.tmp, "once")
            r.start(env={"MR_FAULT": fault, "MR_FAULT_ONCE": once, "MR_FAULT_STOP": "1"})
            commits = Commits(r)
            wait_until(lambda: os.path.exists(once + ".0") or r.proc.poll() is not None, 120, f"{fault} is reached")
            if not os.path.exists(once + ".0"):
                print("skipped: built without fault points")
                return 77
            at = os.path.getmtime(once + ".0")
            same(finish(r, steps), want, fault)
            commits.stop()
            lines, peer = names(r, who), "drafter/1" if who == "drafter/0" else "drafter/0"
            need(lines, f"{fault}: no line names {who}:\n{r.text()[-3000:]}")
            need(len(r.deaths(who)) == 1, f"{fault}: {who} died {len(r.deaths(who))} times: {r.deaths(who)}")
            need(not r.deaths("target/0") and not r.deaths("target/1"), f"a target died: {r.deaths('target/0')}, {r.deaths('target/1')}")
            need(not r.deaths(peer) or not e2e_gpu.FAKE, f"{fault}: {peer}, which only waited, died: {r.deaths(peer)}")
            died = next(e["t"] for e in r.log() if e["actor"] == who and re.search(DEATH, e["msg"]))
            goes_on = commits.next_after(died + PENDING_S)
            took, fate = goes_on - at if goes_on else float("inf"), "died too" if r.deaths(peer) else "lived"
            figure(f"stopped at {fault} to the next commit", f"{took:.2f} s, {peer} {fate}", f"<= {hang_s} + 3 s, lives",
                   took <= hang_s + 3 and fate == "lived")
            print(f"{fault}: named by {lines[0][:200]}; {peer}: {r.deaths(peer)}")
        finally:
            r.close()
    return 0


def case_hung_p2p():
    return hung("p2p", ("reduce.summed:3:drafter/1", "drafter.sum.done:3:drafter/0"))


def case_hung_nccl():
    return hung("nccl", ("reduce.issued:3:drafter/1", "reduce.joining:1:drafter/1", "drafter.place.done:3:drafter/0"))


# ---- the program --------------------------------------------------------------------------------------------------------------------

CASES = {name[5:]: fn for name, fn in list(globals().items()) if name.startswith("case_")}


def gpus():
    p = subprocess.run([os.path.join(os.path.abspath(sys.argv[1]), "millrace-actor"), "devices"], capture_output=True, text=True, check=False)
    return len(json.loads(p.stdout)["devices"]) if p.returncode == 0 else 0


if __name__ == "__main__":
    if len(sys.argv) == 3 and gpus() < 2:
        print("skipped: fewer than two GPUs here")
        sys.exit(77)
    e2e_gpu.CASES = CASES
    sys.exit(e2e_gpu.main(sys.argv))
