#!/usr/bin/env python3
"""Whole runs with GPU targets and cpu drafters; standard library only.

usage: e2e_gpu.py BIN_DIR CASE [FAKE_ACTOR]      exit 0 = passed, 1 = failed, 77 = cannot run here
With FAKE_ACTOR (test/fake_cuda.c) every machine can run it; without, a GPU is needed.
"""
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import e2e_runtime as e2e
from e2e_runtime import HERE, Demo, need, wait_until

FAKE = False


class Gpu(Demo):
    """A few steps of the demo with targets on a GPU."""

    def __init__(self, tag, targets=1, device="cuda:0", **train):
        super().__init__(tag, **train)
        self.data["actors"] = [{"kind": "feeder"}, {"kind": "target", "device": device, "count": targets},
                               {"kind": "drafter", "device": "cpu", "count": 2}]
        self.save()

    def lines(self, pattern, actor=None):
        """Messages of the run's log that match, of one actor or all."""
        try:
            log = self.log()
        except (OSError, ValueError):
            return []
        return [e["msg"] for e in log if re.search(pattern, e["msg"]) and (actor is None or e["actor"] == actor)]

    def loads(self):
        return len(self.lines(r"^weights: [0-9.]+ GiB in "))

    def tensors(self):
        with open(os.path.join(self.dir, "latest", "trainer.safetensors"), "rb") as f:
            return f.read()


def kill(r, name):
    pid = r.pids().get(name)
    if not pid:
        return False
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def refused(args, code, *words, env=None):
    r = Gpu("refused")
    try:
        p = subprocess.run([e2e.MILLRACE, "check", r.topo, *args], capture_output=True, text=True, check=False, env={**os.environ, **(env or {})})
        need(p.returncode == code and all(w in p.stderr for w in words), f"wanted {code} and {words}: {p.returncode}\n{p.stderr}\n{p.stdout}")
        need("\n" not in p.stderr.strip(), f"more than one line: {p.stderr}")
    finally:
        r.close()


def dev(slot, name):
    return ["--set", f'/actors/{slot}/device="{name}"']


def case_refused():
    refused(dev(1, "cuda:3"), 3, '"cuda:3" is not there', "cuda:0 = Fake GPU")
    refused(dev(1, "GPU-00000007"), 3, '"GPU-00000007" is not there')
    refused([], 3, "CUDA_VISIBLE_DEVICES=", "0 GPUs are visible", env={"CUDA_VISIBLE_DEVICES": ""})
    refused([], 3, "is too small", "slabs", "weights", "contexts and activations", env={"FAKE_CUDA_FREE": str(600 << 20)})
    two = ["--set", '/actors=[{"kind":"feeder"},{"kind":"target","device":"cuda:0"},{"kind":"target","device":"GPU-00000000"},'
                    '{"kind":"drafter","device":"cpu"}]']
    refused(two, 2, "are the same GPU")
    apart = ["--set", '/actors=[{"kind":"feeder"},{"kind":"target","device":"cuda:0"},{"kind":"drafter","device":"cuda:1"}]']
    refused(apart, 3, "peer access", "cuda:1", "cuda:0", env={"FAKE_CUDA_DEVICES": "2", "FAKE_CUDA_NO_PEER": "1"})
    refused(["--set", '/actors=[{"kind":"feeder"},{"kind":"target","device":"cpu"},{"kind":"drafter","device":"cuda:0"}]'], 2, "all of them must be")
    r = Gpu("check")
    try:
        p = subprocess.run([e2e.MILLRACE, "check", r.topo], capture_output=True, text=True, check=False)
        need(p.returncode == 0 and "f32 in /dev/shm" in p.stdout and "GiB weights" in p.stdout, f"{p}")
    finally:
        r.close()


def environ(pid):
    with open(f"/proc/{pid}/environ", "rb") as f:
        return dict(x.split("=", 1) for x in f.read().decode().split("\0") if "=" in x)


def case_devices():
    """The second of three devices, by uuid, out of a list; and what each actor sees."""
    r = Gpu("devices", device="cuda:1", max_steps=6)
    try:
        r.start(env={"FAKE_CUDA_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "GPU-00000002, 0"})
        r.reach(1, 120)
        seen = {name: environ(pid).get("CUDA_VISIBLE_DEVICES") for name, pid in r.pids().items()}
        need(seen.get("target/0") == "0" == seen.get("keeper/0") and seen.get("drafter/0") == "" == seen.get("feeder/0"), f"{seen}")
        inspect = subprocess.run([e2e.MILLRACE, "inspect", r.name], capture_output=True, text=True, check=False).stdout
        need("cuda_ipc" in inspect and "sealed" in inspect, inspect)
        r.must_end(0, "completed")
        r.must_be_exact()
    finally:
        r.close()


def case_mixed():
    """The hidden states of a GPU target train cpu drafters; over the fake device, which computes in f32, to the same bits as a cpu target's."""
    blobs = []
    for tag in ("gpu", "cpu"):
        r = Gpu(tag, max_steps=8, deterministic=True, checkpoint_every_steps=4) if tag == "gpu" else Demo(tag, max_steps=8, deterministic=True,
                                                                                                        checkpoint_every_steps=4)
        try:
            r.start()
            r.must_end(0, "completed")
            r.must_be_exact()
            r.must_be_acknowledged_once() if tag == "cpu" else None
            lines = r.ledger()
            need(lines[-1]["loss"] < lines[0]["loss"], f"loss {lines[0]['loss']} -> {lines[-1]['loss']}")
            blobs.append((lines[0]["loss"], lines[-1]["loss"], None if not FAKE else [open(os.path.join(r.dir, "latest", "trainer.safetensors"), "rb").read()]))
            if tag == "gpu":
                need(r.loads() == 1 and r.lines("first microbatch published", "target/0"), r.text()[-2000:])
        finally:
            r.close()
    need(blobs[0][2] == blobs[1][2], "the final trainer.safetensors of gpu and cpu targets differ")
    need(all(abs(a - b) < 0.02 * abs(b) for a, b in zip(blobs[0][:2], blobs[1][:2])), f"losses: gpu {blobs[0][:2]}, cpu {blobs[1][:2]}")


def case_no_uring():
    """Where io_uring is refused: pread loads the weights, and the supervisor takes epoll."""
    r = Gpu("nouring", max_steps=4)
    try:
        lib, src = os.path.join(r.tmp, "no.so"), os.path.join(r.tmp, "no.c")
        with open(src, "w", encoding="utf-8") as f:
            f.write("#include <errno.h>\n" + "".join(f"int {n}() {{ return -EPERM; }}\n" for n in ("io_uring_queue_init", "io_uring_queue_init_params")))
        if subprocess.run(["cc", "-shared", "-fPIC", "-o", lib, src], check=False).returncode:
            print("skipped: no C compiler")
            return 77
        r.start(env={"LD_PRELOAD": lib})
        r.must_end(0, "completed")
        r.must_be_exact()
        need(r.lines(r"GiB/s \(pread\)") and not r.lines(r"\(io_uring\)"), f"{r.lines('GiB/s')}")
    finally:
        r.close()
    return 0


def case_two_targets():
    r = Gpu("two", targets=2, max_steps=10)
    try:
        r.start(env={"FAKE_CUDA_LOAD_MS": "20"})
        r.must_end(0, "completed")
        r.must_be_exact()
        need(r.loads() == 1, f"{r.loads()} loads: exactly one target loads")
    finally:
        r.close()


def case_two_devices():
    """A keeper each; the death of one restarts only the actors of its own device."""
    r = Gpu("twodev", max_steps=24)
    try:
        r.data["actors"].insert(1, {"kind": "target", "device": "cuda:1"})
        r.save()
        r.start(env={"FAKE_CUDA_DEVICES": "2"})
        r.reach(3, 120)
        need(r.loads() == 2, f"{r.loads()} loads for two devices")
        before = r.pids()
        need(kill(r, "keeper/0"), "no keeper/0")
        wait_until(lambda: r.loads() == 3 or r.proc.poll() is not None, 60, "weights on the next keeper")
        after = r.pids()
        devices = {a["name"]: a["device"] for a in r.status()["actors"]}
        same = [n for n in before if devices[n] == devices["keeper/0"]]
        need(all((before[n] != after[n]) == (n in same) for n in before), f"{before} -> {after}, on the device: {same}")
        r.must_end(0, "completed", 300)
        r.must_be_exact()
    finally:
        r.close()


def case_loader_dies():
    """The one that loads is killed before it has sealed: the other takes over, and the run has one complete load."""
    for point in ("weights.loaded", "ipc.arena.seal", "weights.sealed"):
        r = Gpu("loader", targets=2, max_steps=4)
        try:
            r.start(env={"MR_FAULT": f"{point}:1:target", "MR_FAULT_ONCE": os.path.join(r.tmp, "once"), "FAKE_CUDA_LOAD_MS": "20"})
            r.must_end(0, "completed")
            r.must_be_exact()
            need(r.summary()["restarts"] == 1, f"{point}: {r.summary()}")
            need(r.loads() == (1 if point == "weights.sealed" else 2), f"{point}: {r.loads()} loads")
        finally:
            r.close()


def case_kill_targets():
    seed = int(os.environ.get("MR_SEED", time.time_ns() % 1000000))
    print(f"MR_SEED={seed}")
    rnd = random.Random(seed)
    kills, steps = int(os.environ.get("MR_KILLS", "12")), int(os.environ.get("MR_STEPS", "40"))
    r = Gpu("killt", targets=2, max_steps=steps)
    try:
        r.start()
        done = 0
        while done < kills and r.proc.poll() is None:
            r.reach(min(done * steps // (2 * kills), steps - 4), 240)
            time.sleep(rnd.random() * 0.2)
            done += kill(r, rnd.choice(["target/0", "target/1", "drafter/0", "drafter/1", "feeder/0"]))
        need(done == kills, f"only {done} kills")
        r.must_end(0, "completed", 400)
        r.must_be_exact()
        need(r.loads() == 1, f"{r.loads()} loads: a new incarnation maps")
        print(f"{done} kills; " + "; ".join(r.lines("first microbatch published")[-4:]))
    finally:
        r.close()


def case_kill_keeper():
    r = Gpu("killk", targets=2, max_steps=24)
    try:
        r.start()
        for k in range(3):
            r.reach(2 + 5 * k, 240)
            n = r.loads()
            need(n == k + 1, f"{n} loads before kill {k}")
            need(kill(r, "keeper/0"), "no keeper")
            wait_until(lambda n=n: r.loads() > n or r.proc.poll() is not None, 60, "weights on the next keeper")
        r.must_end(0, "completed", 300)
        r.must_be_exact()
        need(r.loads() == 4, f"{r.loads()} loads")
    finally:
        r.close()


def case_drain():
    r = Gpu("drain", max_steps=12)
    try:
        r.start()
        for k in range(3):
            r.reach(1 + 3 * k, 240)
            p = subprocess.run([e2e.MILLRACE, "restart", r.name, "target/0"], capture_output=True, text=True, check=False)
            need(p.returncode == 0, f"{p}")
        r.must_end(0, "completed", 300)
        r.must_be_exact()
        s = r.summary()
        need(s["restarts"] == 0 and s["microbatches_recomputed"] == 0 and r.loads() == 1, f"a drain loses nothing: {s}, {r.loads()} loads")
    finally:
        r.close()


def case_sticky():
    """A sticky CUDA error: exit code 4, nothing published, a new process."""
    r = Gpu("sticky", max_steps=12)
    try:
        sticky = os.path.join(r.tmp, "sticky")
        r.start(env={"FAKE_CUDA_STICKY": sticky})
        for k in range(2):
            r.reach(2 + 4 * k, 240)
            with open(sticky, "w", encoding="utf-8"):
                pass
            wait_until(lambda: not os.path.exists(sticky), 60, "somebody meets the error")
        r.must_end(0, "completed", 300)
        r.must_be_exact()
        need(len(r.lines("exit code 4 .a CUDA error")) == 2 and r.summary()["restarts"] == 2, f"{r.lines('exit code')}, {r.summary()}")
    finally:
        r.close()


CASES = {name[5:]: fn for name, fn in list(globals().items()) if name.startswith("case_")}


def main(argv):
    global FAKE
    if len(argv) not in (3, 4) or argv[2] not in CASES:
        print(__doc__ + "cases: " + " ".join(CASES), file=sys.stderr)
        return 2
    e2e.BIN = os.path.abspath(argv[1])
    e2e.MILLRACE = os.path.join(e2e.BIN, "millrace")
    os.environ.pop("MILLRACE_ACTOR", None)
    if len(argv) == 4:
        FAKE = True
        os.environ["MILLRACE_ACTOR"] = os.path.abspath(argv[3])
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    else:
        p = subprocess.run([os.path.join(e2e.BIN, "millrace-actor"), "devices"], capture_output=True, text=True, check=False)
        if p.returncode or not json.loads(p.stdout)["devices"]:
            print(f"skipped: no GPU here: {p.stdout.strip()}")
            return 77
    try:
        return CASES[argv[2]]() or 0
    except AssertionError as e:
        print(f"FAILED: {e}")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
