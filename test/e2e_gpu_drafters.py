#!/usr/bin/env python3
"""Whole runs with drafters on GPUs; standard library only.

usage: e2e_gpu_drafters.py BIN_DIR CASE [FAKE_ACTOR]      exit 0 = passed, 1 = failed, 77 = cannot run here
With FAKE_ACTOR (test/fake_cuda.c) every machine can run it, on as many devices as a case wants, and the final state must be the cpu run's bit
for bit; without, a GPU is needed, and states are compared with those of other runs on it.  MR_KILLS, MR_STEPS and MR_SEED vary the kills.
"""
import array
import json
import os
import random
import re
import signal
import struct
import subprocess
import sys
import time

import e2e_gpu
import e2e_runtime as e2e
from e2e_gpu import Gpu, kill
from e2e_runtime import HERE, Demo, need, wait_until


def drafters(*devices):
    return [{"kind": "drafter", "device": d} for d in devices]


class All(Gpu):
    """The demo, targets and drafters on GPUs.  Microbatches are small enough for the fake device, whose hidden states are twice as wide."""

    def __init__(self, tag, draft=("cuda:0",), target="cuda:0", **train):
        train = {"deterministic": True, "checkpoint_every_steps": 4, "grad_accum": 2 // len(draft), **train}
        super().__init__(tag, **train)
        self.data["actors"] = [{"kind": "feeder"}, {"kind": "target", "device": target, "count": 1}, *drafters(*draft)]
        small(self)

    def trainer(self, step="latest"):
        where = self.dir if step == "latest" else os.path.join(self.dir, "checkpoints")
        with open(os.path.join(where, step, "trainer.safetensors"), "rb") as f:
            return f.read()


def small(r):
    r.data["data"].update(max_tokens=400, max_samples=2)
    r.save()


def on_cpu(draft, **train):
    """What the same run ends with on the cpu."""
    r = Demo("cpu", **{"deterministic": True, "checkpoint_every_steps": 4, "grad_accum": 2 // draft, **train})
    r.data["actors"] = [{"kind": "feeder"}, {"kind": "target", "device": "cpu"}, {"kind": "drafter", "device": "cpu", "count": draft}]
    small(r)
    try:
        r.start()
        r.must_end(0, "completed", 300)
        with open(os.path.join(r.dir, "latest", "trainer.safetensors"), "rb") as f:
            return f.read()
    finally:
        r.close()


def finish(r, steps):
    r.must_end(0, "completed", 400)
    r.must_be_exact()
    lines = r.ledger()
    need([x["step"] for x in lines] == list(range(steps)), f"steps of the ledger: {len(lines)}")
    return r.trainer()


def undisturbed(tag, steps, env=None, **kw):
    r = All(tag, max_steps=steps, **kw)
    try:
        r.start(env=env or {})
        blob = finish(r, steps)
        lines = r.ledger()
        need(lines[-1]["loss"] < lines[0]["loss"], f"loss {lines[0]['loss']} -> {lines[-1]['loss']}")
        need(r.summary()["restarts"] == 0, f"{r.summary()}")
        return blob
    finally:
        r.close()


def same(a, b, what):
    need(a == b, f"the final trainer.safetensors differ: {what}")


def two_devices():
    return {"FAKE_CUDA_DEVICES": "2"}


def case_one():
    """One drafter: the same run twice gives the same bits; over the fake device, those of the cpu."""
    a = undisturbed("one", 12)
    same(a, on_cpu(1, max_steps=12) if e2e_gpu.FAKE else undisturbed("again", 12), "one drafter")


def parameters(blob):
    """The flat parameters of a trainer.safetensors."""
    n = struct.unpack("<Q", blob[:8])[0]
    out = array.array("f")
    for name, t in sorted(json.loads(blob[8:8 + n]).items()):
        if name != "__metadata__" and ".exp_avg" not in name:
            begin, end = t["data_offsets"]
            out.frombytes(blob[8 + n + begin:8 + n + end])
    return out


def distance(a, b):
    return (sum((x - y) ** 2 for x, y in zip(a, b)) / sum(y * y for y in b)) ** 0.5


def case_p2p():
    """Two drafters on one GPU: the weights of one drafter with twice the grad_accum, but for the order of the sums."""
    a = undisturbed("p2p", 12, draft=("cuda:0", "cuda:0"))
    d = distance(parameters(a), parameters(undisturbed("twice", 12)))
    need(d < 1e-4, f"two drafters against one with twice the grad_accum: relative distance {d:.1e}")
    print(f"two drafters against one with twice the grad_accum: relative distance of the weights {d:.1e}")
    same(a, on_cpu(2, max_steps=12) if e2e_gpu.FAKE else undisturbed("again", 12, draft=("cuda:0", "cuda:0")), "two drafters")


def case_apart():
    """Targets on one device, drafters on another and on both: hidden states are pulled, accumulators are read across."""
    if not e2e_gpu.FAKE:
        print("skipped: one GPU")
        return 77
    want = on_cpu(2, max_steps=12)
    same(undisturbed("apart", 12, two_devices(), draft=("cuda:1", "cuda:1")), want, "drafters apart from the target")
    same(undisturbed("both", 12, two_devices(), draft=("cuda:0", "cuda:1")), want, "drafters on two devices")
    same(undisturbed("alone", 12, two_devices(), draft=("cuda:1",)), on_cpu(1, max_steps=12), "one drafter apart")
    return 0


POINTS = ("drafter.item.claimed", "drafter.gradient.added", "drafter.item.accumulated", "drafter.place.done", "drafter.reduce.entered", "reduce.summed",
          "drafter.sum.done", "drafter.reduced.set", "drafter.apply.done", "drafter.accumulator.zeroed", "drafter.items.freed", "drafter.applied.set",
          "drafter.state.made", "drafter.join.zeroed", "ckpt.model.written", "ckpt.state.free", "ckpt.complete")


def case_points():
    """A drafter dies at each named point: the state does not show it."""
    for draft in (("cuda:0",), ("cuda:0", "cuda:0")):
        want = undisturbed("points", 5, draft=draft, checkpoint_every_steps=2)
        for point in POINTS:
            r = All("point", max_steps=5, draft=draft, checkpoint_every_steps=2)
            try:
                r.start(env={"MR_FAULT": f"{point}:1:drafter", "MR_FAULT_ONCE": os.path.join(r.tmp, "once")})
                same(finish(r, 5), want, f"{point}, {len(draft)} drafters")
                need(r.summary()["restarts"] == 1, f"{point}: {r.summary()}")
            finally:
                r.close()


def case_prefetched():
    """A drafter dies with a second microbatch claimed and on its way."""
    env = two_devices()
    want = undisturbed("next", 6, env, draft=("cuda:1",))
    r = All("nextdies", max_steps=6, draft=("cuda:1",))
    try:
        r.start(env={**env, "MR_FAULT": "drafter.next.claimed:2:drafter", "MR_FAULT_ONCE": os.path.join(r.tmp, "once")})
        same(finish(r, 6), want, "a death with a prefetched microbatch")
        need(r.summary()["restarts"] == 1, f"{r.summary()}")
    finally:
        r.close()


def row(r, name):
    p = subprocess.run([e2e.MILLRACE, "status", r.name, "--json"], capture_output=True, text=True, check=False)
    actors = json.loads(p.stdout)["actors"] if p.returncode == 0 else []
    return next((a for a in actors if a["name"] == name), {"incarnation": 0, "first_claim_s": None})


def kill_at(r, *names):
    """SIGKILL to all of them.  When, on the monotonic clock; None when one of them is not there."""
    pids = r.pids()
    if any(name not in pids for name in names):
        return None
    at = time.monotonic()
    for name in names:
        try:
            os.kill(pids[name], signal.SIGKILL)
        except ProcessLookupError:
            return None
    return at


def wait_for_claim(r, name, old):
    """Until an incarnation after `old` has claimed, or the run is over."""
    end = time.monotonic() + 60
    while r.proc.poll() is None and time.monotonic() < end:
        now = row(r, name)
        if now["incarnation"] > old and now["first_claim_s"] is not None:
            return
        time.sleep(0.02)


RESTART = re.compile(r"^(\S+), incarnation (\d+): reaped at ([\d.]+) s, started after ([\d.]+) ms, running after ([\d.]+) ms, first claim after ([\d.]+) ms$")


def restarts(r, killed):
    """Where the time went: (seconds from SIGKILL to the next claim, what the log says about it) of each kill [(monotonic time, actor)].  The
    supervisor and the actors stamp with the same clock."""
    log, out = r.log(), []
    told = [(m, i) for i, e in enumerate(log) for m in [RESTART.match(e["msg"])] if m and e["actor"] == "supervisor"]
    for at, name in killed:
        m, i = next(((m, i) for m, i in told if m[1] == name and float(m[3]) > at), (None, 0))
        if not m:
            continue                                             # the run was over first
        reaped, (start, running, claim) = float(m[3]), (float(m[k]) for k in (4, 5, 6))
        own = [e["msg"] for e in log[:i + 6] if e["actor"] == name]
        own = own[max(k for k, msg in enumerate(own) if re.match(rf"incarnation {int(m[2]) - 1} ", msg)) + 1:]
        own = [msg for msg in own if not re.match(rf"incarnation {m[2]} ", msg)][:3]
        out.append((reaped - at + claim * 1e-3,
                    f"{name}, incarnation {m[2]}: {(reaped - at) * 1e3:.0f} ms until reaped, {start:.0f} started, {running - start:.0f} running, "
                    f"{claim - running:.0f} claimed; it says: {' | '.join(own)}"))
    return sorted(out)


def tell_restarts(r, killed, what):
    back = restarts(r, killed)
    need(len(back) >= len(killed) - 2, f"{len(killed)} kills, {len(back)} restarts in the log")
    for s, where in back[-3:]:
        print(f"{s:.3f} s  {where}")
    print(f"{len(killed)} kills, {what}: bits as undisturbed; SIGKILL to the next claim: median {back[len(back) // 2][0]:.3f} s, worst {back[-1][0]:.3f} s "
          f"of {len(back)}")


def kills(draft):
    seed = int(os.environ.get("MR_SEED", time.time_ns() % 1000000))
    print(f"MR_SEED={seed}")
    rnd = random.Random(seed)
    n, steps = int(os.environ.get("MR_KILLS", "10")), int(os.environ.get("MR_STEPS", "30"))
    want = undisturbed("calm", steps, draft=draft)
    r = All("kills", max_steps=steps, draft=draft)
    try:
        r.start()
        for i in range(len(draft)):                  # not while all actors of the device make their contexts: that takes its time, killed or not
            wait_for_claim(r, f"drafter/{i}", 0)
        done = []
        while len(done) < n and r.proc.poll() is None:
            r.reach(min(len(done) * steps // (2 * n), steps - 4), 240)
            time.sleep(rnd.random() * float(os.environ.get("MR_PAUSE", "0.2")))
            name = f"drafter/{rnd.randrange(len(draft))}"
            old, at = row(r, name)["incarnation"], kill_at(r, name)
            if at:
                done.append((at, name))
                wait_for_claim(r, name, old)
        need(len(done) == n, f"only {len(done)} kills")
        same(finish(r, steps), want, f"{n} kills")
        tell_restarts(r, done, f"{len(draft)} drafters")
    finally:
        r.close()


def case_kill_one():
    kills(("cuda:0",))


def case_kill_two():
    kills(("cuda:0", "cuda:0"))


def case_kill_claimed():
    """Kills from outside before the first microbatch is done, more of them than restart.max: no budget, and no back-off, is used up."""
    r = All("claimed", max_steps=6)
    r.data["restart"] = {"max": 2, "window_s": 600, "backoff_ms": 50, "hang_s": 60}
    r.save()
    try:
        r.start(env={"MR_FAULT": ",".join(["drafter.item.claimed:1:drafter"] * 4), "MR_FAULT_ONCE": os.path.join(r.tmp, "once")})
        finish(r, 6)
        need(r.summary()["restarts"] == 4, f"{r.summary()}")
    finally:
        r.close()


def case_kill_keeper():
    """With the keeper goes the state of its drafter: a peer on another device has the same; without one, only --resume goes on."""
    if e2e_gpu.FAKE:
        env, draft = two_devices(), ("cuda:0", "cuda:1")
        want = undisturbed("calm", 20, env, draft=draft)
        r = All("peer", max_steps=20, draft=draft)
        try:
            r.start(env=env)
            for k in range(4):
                r.reach(2 + 4 * k, 240)
                n = len(r.lines("restored from drafter"))
                need(kill(r, f"keeper/{k % 2}"), "no keeper")
                wait_until(lambda n=n: len(r.lines("restored from drafter")) > n or r.proc.poll() is not None, 60, "the state comes from the peer")
            same(finish(r, 20), want, "four keepers killed")
        finally:
            r.close()
    steps, every, at = (12, 4, 6) if e2e_gpu.FAKE else (900, 100, 150)         # a GPU makes more than a hundred of these steps a second
    want = undisturbed("calm", steps, checkpoint_every_steps=every)
    r = All("alone", max_steps=steps, checkpoint_every_steps=every)
    try:
        r.start()
        r.reach(at, 240)
        need(kill(r, "keeper/0"), "no keeper")
        r.must_end(1, "failed", 120)
        need(r.lines("--resume goes on"), r.text()[-2000:])
        r.start("--resume")
        same(finish(r, steps), want, "resumed after the only copy was lost")
    finally:
        r.close()


def case_nccl():
    """An all-reduce over one rank is a copy; over two on two devices, the ordered sum (the fake device's is).  Two on one device are refused."""
    one = undisturbed("nccl", 8, reduce="nccl")
    same(one, on_cpu(1, max_steps=8) if e2e_gpu.FAKE else undisturbed("local", 8), "one rank")
    r = All("refused", draft=("cuda:0", "cuda:0"), reduce="nccl")
    try:
        p = subprocess.run([e2e.MILLRACE, "check", r.topo], capture_output=True, text=True, check=False)
        need(p.returncode == 2 and "one rank per GPU" in p.stderr and "p2p" in p.stderr, f"{p}")
    finally:
        r.close()
    if e2e_gpu.FAKE:
        same(undisturbed("nccl2", 12, two_devices(), draft=("cuda:0", "cuda:1"), reduce="nccl"), on_cpu(2, max_steps=12), "two ranks")


def strike_together(reduce, groups, died, how):
    """Each group of actors is killed at one instant, two steps after the one before is back."""
    draft, steps = ("cuda:0", "cuda:1"), 3 + 3 * len(groups)
    want = undisturbed("calm", steps, two_devices(), draft=draft, reduce=reduce)
    r = All("together", max_steps=steps, draft=draft, reduce=reduce)
    try:
        r.start(env=two_devices())
        for k, names in enumerate(groups):
            r.reach(1 + 3 * k, 240)
            wait_until(lambda names=names: kill_at(r, *names), 60, f"all of {names} live")
        same(finish(r, steps), want, f"{reduce}, {how}")
        need(r.summary()["restarts"] == died, f"{reduce}, {how}: {r.summary()}")
    finally:
        r.close()


def case_together():
    """Both drafters at once; a drafter and the other device's keeper at once."""
    for reduce in ("p2p", "nccl"):
        strike_together(reduce, [("drafter/0", "drafter/1")] * 4, 8, "both drafters, four times")
        # With the keeper go its device's drafter and target; device 1 has no target.
        strike_together(reduce, [("keeper/0", "drafter/1"), ("drafter/0", "keeper/1")], 4 + 3, "a keeper and the other drafter, twice")


def case_both_keepers():
    """With both keepers goes the last copy of the state: the run ends and says what to do, and --resume goes on to the same end."""
    draft = ("cuda:0", "cuda:1")
    want = undisturbed("calm", 16, two_devices(), draft=draft)
    r = All("keepers", max_steps=16, draft=draft)
    try:
        r.start(env=two_devices())
        r.reach(6, 240)
        need(kill_at(r, "keeper/0", "keeper/1"), "no keepers")
        r.must_end(1, "failed", 120)
        need(r.lines("--resume goes on"), r.text()[-2000:])
        r.start("--resume", env=two_devices())
        same(finish(r, 16), want, "resumed after both copies were lost")
    finally:
        r.close()


def rank_dies(want, point, n, who, died, env=None):
    """One death at the n-th passage of a point; `died` restarts in all, and the bits of `want`."""
    r = All("point", max_steps=6, draft=("cuda:0", "cuda:1"), reduce="nccl")
    try:
        r.start(env={**two_devices(), **(env or {}), "MR_FAULT": f"{point}:{n}:{who}", "MR_FAULT_ONCE": os.path.join(r.tmp, "once")})
        same(finish(r, 6), want, f"{point}, {who}")
        need(r.summary()["restarts"] == died, f"{point}, {who}, {env}: {r.summary()}\n{r.text()[-2000:]}")
    finally:
        r.close()


def case_nccl_points():
    """A rank dies while the group is made, joined, or summing: the survivor gives its communicator up, lives, and the next one gives the same
    bits; also when it learns of the death by an error of the library, before the supervisor has reaped the dead."""
    want = undisturbed("calm", 6, two_devices(), draft=("cuda:0", "cuda:1"), reduce="nccl")
    for point in ("reduce.id.made", "reduce.id.known", "reduce.joining", "reduce.issued", "reduce.summed", "drafter.sum.done", "drafter.apply.done"):
        for who in ("drafter/0", "drafter/1"):
            if point == "reduce.id.made" and who == "drafter/1":
                continue
            rank_dies(want, point, 1 if point.startswith(("reduce.id", "reduce.join")) else 2, who, 1)
    for who in ("drafter/0", "drafter/1"):
        rank_dies(want, "reduce.joining", 1, who, 1, {"FAKE_CUDA_COMM_ERRORS": "1"})
        rank_dies(want, "reduce.issued", 2, who, 1, {"FAKE_CUDA_COMM_ERRORS": "1"})
    # A library that does not let go: of a group without work it may keep what it has; a sum in flight could still be written.
    rank_dies(want, "reduce.id.known", 1, "drafter/1", 1, {"FAKE_CUDA_COMM_STUCK": "1"})
    rank_dies(want, "reduce.issued", 2, "drafter/1", 2, {"FAKE_CUDA_COMM_STUCK": "1"})


def case_init():
    """A run that begins with a checkpoint's weights."""
    r = All("first", max_steps=4)
    try:
        r.start()
        finish(r, 4)
        second = All("second", max_steps=4)
        second.data["drafter"]["init"] = "checkpoint:" + os.path.realpath(os.path.join(r.dir, "latest"))
        second.save()
        try:
            second.start()
            finish(second, 4)
            a, b = r.ledger(), second.ledger()
            need(b[0]["loss"] < a[0]["loss"], f"first loss {a[0]['loss']}, from the checkpoint {b[0]['loss']}")
        finally:
            second.close()
    finally:
        r.close()


def case_sticky():
    """A sticky CUDA error in whoever meets it: exit code 4, a new process, the same end."""
    want = undisturbed("well", 12)
    r = All("sticky", max_steps=12)
    try:
        sticky = os.path.join(r.tmp, "sticky")
        r.start(env={"FAKE_CUDA_STICKY": sticky})
        for k in range(3):
            r.reach(1 + 3 * k, 240)
            with open(sticky, "w", encoding="utf-8"):
                pass
            wait_until(lambda: not os.path.exists(sticky), 60, "somebody meets the error")
        same(finish(r, 12), want, "three sticky errors")
        need(len(r.lines("exit code 4 .a CUDA error")) == 3 and r.summary()["restarts"] == 3, f"{r.lines('exit code')}, {r.summary()}")
    finally:
        r.close()


def case_poisoned():
    """A kernel of the drafter writes out of bounds: exit code 4, nothing published, a new process, the same end.  Other actors go on."""
    actor = os.path.join(e2e.BIN, "..", "test", "millrace-actor-poison")
    if e2e_gpu.FAKE or not os.path.exists(actor):
        print("skipped: needs a GPU and its own actor program")
        return 77
    want = undisturbed("well", 16)
    r = All("poison", max_steps=16)
    try:
        poison = os.path.join(r.tmp, "poison")
        r.start(env={"MR_POISON": poison, "MILLRACE_ACTOR": actor})
        for k in range(3):
            r.reach(1 + 4 * k, 240)
            at = time.monotonic()
            with open(poison, "w", encoding="utf-8"):
                pass
            wait_until(lambda k=k: len(r.lines("exit code 4 .a CUDA error")) > k, 60, "the drafter meets the error")
            print(f"poisoned to dead: {time.monotonic() - at:.2f} s")
        same(finish(r, 16), want, "three poisoned contexts")
        need(r.summary()["restarts"] == 3, f"{r.summary()}")
    finally:
        r.close()
    return 0


def case_refused():
    """A device that is too small is a refusal with the arithmetic, before anything starts."""
    r = All("small")
    try:
        env = {**os.environ, "FAKE_CUDA_FREE": str(700 << 20)}
        p = subprocess.run([e2e.MILLRACE, "check", r.topo], capture_output=True, text=True, check=False, env=env)
        need(p.returncode == 3 and "is too small" in p.stderr and "drafter state" in p.stderr, f"{p}")
        p = subprocess.run([e2e.MILLRACE, "check", r.topo], capture_output=True, text=True, check=False)
        need(p.returncode == 0 and "working weights" in p.stdout and "block rows" in p.stdout, f"{p}")
        p = subprocess.run([e2e.MILLRACE, "check", os.path.join(os.path.dirname(HERE), "conf", "demo-gpu-all.json")], capture_output=True, text=True,
                           check=False, cwd=os.path.dirname(HERE))
        need(p.returncode == 0, f"{p}")
    finally:
        r.close()


CASES = {name[5:]: fn for name, fn in list(globals().items()) if name.startswith("case_")}

if __name__ == "__main__":
    e2e_gpu.CASES = CASES
    sys.exit(e2e_gpu.main(sys.argv))
