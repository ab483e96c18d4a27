#!/usr/bin/env python3
"""Whole runs with real processes and synthetic actors; standard library only.

usage: e2e_runtime.py BIN_DIR CASE        exit 0 = passed, 1 = failed, 77 = cannot run here
Each case makes its own directory under /tmp and run names test-<pid>-..., and leaves nothing in /dev/shm.
"""
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request

HERE = os.path.dirname(os.path.abspath(__file__))
SLOW = float(os.environ.get("MR_SLOW", "1"))          # a machine that is slower by this factor: deadlines only
BIN = ""
MILLRACE = ""


def need(ok, what):
    if not ok:
        raise AssertionError(what)


def wait_until(fn, seconds, what):
    end = time.monotonic() + seconds * SLOW
    while time.monotonic() < end:
        value = fn()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {seconds * SLOW:.0f} s: {what}")


def topology(name, rundir, rows=400, targets=2, drafters=2, us=3000, **more):
    topo = {
        "run": {"name": name, "dir": rundir, "seed": 1},
        "target": {"checkpoint": "synthetic:hidden=16,layers=6,vocab=256", "layers": [1, 3]},
        "drafter": {"layers": 1, "block_size": 8, "mask_token_id": 1, "anchors": 8, "intermediate_size": 32, "num_attention_heads": 2,
                    "num_key_value_heads": 1, "head_dim": 8},
        "data": {"train": f"synthetic:{rows}?min=20&max=100&seed=1", "max_tokens": 128, "buckets": [32, 64, 128], "token_budget": 256},
        "train": {"epochs": 2, "grad_accum": 2, "lr": 1e-3, "checkpoint_every_steps": 10, "keep_checkpoints": 2},
        "queue": {"slabs_per_device": 12},
        "actors": [
            {"kind": "feeder"},
            {"kind": "target", "device": "cpu", "engine": "synthetic", "count": targets, "us_per_item": us, "us_per_token": 1},
            {"kind": "drafter", "device": "cpu", "engine": "synthetic", "count": drafters, "us_per_item": us, "us_per_token": 1},
        ],
        "restart": {"max": 5, "window_s": 60, "backoff_ms": 50, "hang_s": 60},
    }
    for section, keys in more.items():
        topo.setdefault(section, {}).update(keys)
    return topo


class Run:
    """One run directory, and the processes started on it."""

    def __init__(self, tag, **kw):
        self.tmp = tempfile.mkdtemp(prefix="mr-e2e-")
        self.name = f"test-{os.getpid()}-{tag}"
        self.dir = os.path.join(self.tmp, "run")
        self.topo = os.path.join(self.tmp, "topo.json")
        self.data = topology(self.name, self.dir, **kw)
        self.save()
        self.proc = None

    def save(self):
        with open(self.topo, "w", encoding="utf-8") as f:
            json.dump(self.data, f)

    def start(self, *args, env=None):
        self.out = os.path.join(self.tmp, "out.txt")
        with open(self.out, "a", encoding="utf-8") as out:
            self.proc = subprocess.Popen([MILLRACE, "run", self.topo, *args], stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                                         env={**os.environ, **(env or {})}, start_new_session=True)
        return self.proc

    def wait(self, seconds=120):
        try:
            return self.proc.wait(seconds * SLOW)
        except subprocess.TimeoutExpired:
            print(self.text()[-3000:])
            subprocess.run([MILLRACE, "inspect", self.name], check=False)
            raise AssertionError(f"run {self.name} does not end within {seconds * SLOW:.0f} s") from None

    def text(self):
        with open(self.out, encoding="utf-8", errors="replace") as f:
            return f.read()

    def status(self):
        r = subprocess.run([MILLRACE, "status", self.name, "--json"], capture_output=True, text=True, check=False)
        return json.loads(r.stdout) if r.returncode == 0 else None

    def step(self):
        s = self.status()
        return s["step"] if s else -1

    def reach(self, step, seconds=60):
        """Waits until the run is at `step`; says what it looks like when it never gets there."""
        try:
            wait_until(lambda: self.step() >= step or self.proc.poll() is not None, seconds, f"step {step}")
        except AssertionError:
            print(self.text()[-3000:])
            subprocess.run([MILLRACE, "inspect", self.name], check=False)
            raise
        need(self.proc.poll() is None, f"the run is over before step {step}: exit code {self.proc.returncode}\n{self.text()[-3000:]}")

    def pids(self):
        s = self.status()
        return {a["name"]: a["pid"] for a in s["actors"] if a["pid"] > 0} if s else {}

    def ledger(self):
        with open(os.path.join(self.dir, "ledger.jsonl"), encoding="utf-8") as f:
            return [json.loads(line) for line in f]

    def steps(self):
        with open(os.path.join(self.dir, "metrics", "steps.jsonl"), encoding="utf-8") as f:
            return [json.loads(line) for line in f]

    def summary(self):
        with open(os.path.join(self.dir, "summary.json"), encoding="utf-8") as f:
            return json.load(f)

    def log(self):
        with open(os.path.join(self.dir, "log.jsonl"), encoding="utf-8") as f:
            return [json.loads(line) for line in f]

    def shm(self):
        return [n for n in os.listdir("/dev/shm") if n.startswith(f"millrace-{self.name}.")]

    def must_end(self, code, status=None, seconds=120):
        got = self.wait(seconds)
        need(got == code, f"exit code {got}, expected {code}; output:\n{self.text()[-3000:]}")
        need(not self.shm(), f"left in /dev/shm: {self.shm()}")
        if status:
            need(self.summary()["status"] == status, f"status {self.summary()['status']}, expected {status}")

    def must_be_exact(self):
        """Every microbatch in exactly one line; totals agree; the mix is the plan's."""
        s, lines = self.summary(), self.ledger()
        items = [i["item"] for line in lines for i in line["items"]]
        need(sorted(items) == list(range(s["microbatches_total"])), "the ledger does not hold every microbatch exactly once")
        need(s["microbatches_committed"] == s["microbatches_total"], f"summary: {s}")
        need([line["step"] for line in lines] == list(range(s["steps"])), "steps of the ledger")
        need(s["tokens"] == sum(i["tokens"] for line in lines for i in line["items"]), "tokens of the summary and of the ledger")
        self.must_add_up_by_position(s["steps"])
        self.must_pass_ledger_check()

    def must_add_up_by_position(self, n_steps):
        """A line for each step; its figures by position in the block are those of all its labels, each counted once."""
        lines = self.steps()
        need([x["step"] for x in lines] == list(range(n_steps)), "steps of steps.jsonl")
        slots = self.data["drafter"]["block_size"] - 1
        for x in lines:
            need(len(x["pos_labels"]) == len(x["pos_correct"]) == len(x["pos_loss"]) == slots, f"positions: {x}")
            need(sum(x["pos_labels"]) == x["labels"] > 0 and sum(x["pos_correct"]) == x["correct"], f"labels by position: {x}")
            need(all((loss is None) == (n == 0) for loss, n in zip(x["pos_loss"], x["pos_labels"])), f"loss by position: {x}")

    def by_position(self):
        return [(x["pos_labels"], x["pos_correct"], x["pos_loss"]) for x in self.steps()]

    def ledger_check(self):
        tool = os.path.join(HERE, "..", "tools", "ledger_check.py")
        return subprocess.run([sys.executable, tool, self.dir], capture_output=True, text=True, check=False)

    def must_pass_ledger_check(self):
        """Also of a run that ended early: run.json says what the first epoch had.  And the tool sees two swapped microbatches."""
        path, lines = os.path.join(self.dir, "ledger.jsonl"), self.ledger()
        r = self.ledger_check()
        need(r.returncode == 0 and ("not judged" not in r.stdout or max(x["epoch"] for x in lines) > 0), r.stdout + r.stderr)
        first = [x for x in lines if x["epoch"] == 0]            # within one epoch: across two, the samples give it away
        swap = next(((a, b) for a in first for b in first[:a["step"]] if a["items"][0]["bucket"] not in [i["bucket"] for i in b["items"]]), None)
        if not swap:
            return
        shutil.copy(path, path + ".true")
        swap[0]["items"][0], swap[1]["items"][0] = swap[1]["items"][0], swap[0]["items"][0]
        with open(path, "w", encoding="utf-8") as f:
            f.writelines(json.dumps(x) + "\n" for x in lines)
        r = self.ledger_check()
        os.replace(path + ".true", path)
        need(r.returncode == 1 and "apportionment" in r.stdout, f"two microbatches were swapped: {r}")

    def must_be_acknowledged_once(self):
        acks = [e["actor"] for e in self.log() if e["msg"].endswith("acknowledged the end and left")]
        actors = sum(a.get("count", 1) for a in self.data["actors"])
        need(len(acks) == actors == len(set(acks)), f"acknowledgements: {acks}")
        log = self.log()
        last = max(i for i, e in enumerate(log) if e["msg"].startswith("checkpoint "))
        first = min(i for i, e in enumerate(log) if e["msg"].endswith("acknowledged the end and left"))
        need(last < first, "an actor saw the end before the last checkpoint was published")

    def close(self):
        if self.proc and self.proc.poll() is None:
            self.proc.kill()
            self.proc.wait()
        time.sleep(0.1)
        if self.shm():
            subprocess.run([MILLRACE, "clean"], capture_output=True, check=False)
        shutil.rmtree(self.tmp, ignore_errors=True)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# ---- cases ------------------------------------------------------------------------------------------------------------------------


def case_complete(io="auto"):
    r = Run("complete")
    try:
        r.start("--io", io)
        r.must_end(0, "completed")
        r.must_be_exact()
        r.must_be_acknowledged_once()
        s = r.summary()
        need(s["restarts"] == 0 and s["microbatches_recomputed"] == 0, f"summary: {s}")
        need(set(s) == {"status", "microbatches_total", "microbatches_committed", "microbatches_recomputed", "steps", "epochs", "tokens",
                        "draft_tokens", "restarts", "loss_first", "loss_last", "accept_proxy", "wall_s", "tokens_per_s", "dropped"}, f"keys: {set(s)}")
        need(os.readlink(os.path.join(r.dir, "latest")) == f"checkpoints/step-{s['steps']}", "latest")
        need(len(os.listdir(os.path.join(r.dir, "checkpoints"))) <= 2, "keep_checkpoints")
        names = set(os.listdir(os.path.join(r.dir, "latest")))
        need({"config.json", "model.safetensors", "trainer.safetensors", "state.json"} <= names, f"checkpoint: {names}")
        need(any(n.startswith("events.out.tfevents.") for n in os.listdir(os.path.join(r.dir, "metrics"))), "no TensorBoard events")
        again = subprocess.run([MILLRACE, "run", r.topo], capture_output=True, text=True, check=False)
        need(again.returncode == 2 and "--resume" in again.stderr, f"a run.dir with a run must be refused: {again}")
        again = subprocess.run([MILLRACE, "run", r.topo, "--resume"], capture_output=True, text=True, check=False)
        need(again.returncode == 0 and "complete" in again.stdout, f"--resume of a complete run: {again}")
    finally:
        r.close()


def case_complete_epoll():
    case_complete("epoll")


def case_deterministic():
    """Two runs, the second with kills: the same final weights, bit for bit, and the same figures by position."""
    blobs, by_position, rnd = [], [], random.Random(7)
    for tag in ("det-a", "det-b"):
        r = Run(tag, rows=1600, train={"deterministic": True})
        try:
            r.start()
            for k in range(8 if tag == "det-b" else 0):
                r.reach(5 * k + 2, 30)
                kill_one(r, rnd)
            r.must_end(0, "completed")
            r.must_be_exact()
            need((r.summary()["restarts"] >= 7) == (tag == "det-b"), f"restarts: {r.summary()['restarts']}")
            with open(os.path.join(r.dir, "latest", "trainer.safetensors"), "rb") as f:
                blobs.append(f.read())
            by_position.append(r.by_position())
        finally:
            r.close()
    need(blobs[0] == blobs[1], "the final trainer.safetensors differ")
    need(by_position[0] == by_position[1], "the figures by position differ")


class Demo(Run):
    """A few steps of conf/demo.json: the real target, the real drafter."""

    def __init__(self, tag, **train):
        super().__init__(tag)
        root = os.path.dirname(HERE)
        with open(os.path.join(root, "conf", "demo.json"), encoding="utf-8") as f:
            self.data = json.load(f)
        self.data["run"].update(name=self.name, dir=self.dir)
        self.data["target"]["checkpoint"] = os.path.join(root, "demo", "target")
        self.data["data"]["train"] = os.path.join(root, "demo", "train.safetensors")
        self.data["train"].update(train)
        self.data.pop("metrics")
        self.save()


def case_demo():
    """The real engines: deterministic mode gives the same bits with 30 kills, resume goes on from them; eval and export take what comes out."""
    blobs, by_position, rnd = [], [], random.Random(11)
    for tag in ("demo-a", "demo-b"):
        r = Demo(tag, max_steps=36, checkpoint_every_steps=4, deterministic=True)
        try:
            r.start()
            for k in range(30 if tag == "demo-b" else 0):
                r.reach(k + 1, 120)
                kill_one(r, rnd)
            if tag == "demo-b":                                 # and the supervisor, late in the run
                r.reach(32, 240)
                r.proc.kill()
                r.proc.wait()
                r.start("--resume")
            r.must_end(0, "completed", 300)
            lines = r.ledger()
            need([x["step"] for x in lines] == list(range(36)), "steps of the ledger")
            need(lines[-1]["loss"] < lines[0]["loss"], f"loss {lines[0]['loss']} -> {lines[-1]['loss']}")
            r.must_add_up_by_position(36)
            by_position.append(r.by_position())
            latest = os.path.join(r.dir, "latest")
            with open(os.path.join(latest, "trainer.safetensors"), "rb") as f:
                blobs.append(f.read())
            demo = os.path.join(os.path.dirname(HERE), "demo")
            e = subprocess.run([MILLRACE, "eval", "--target", os.path.join(demo, "target"), "--draft", latest, "--data", os.path.join(demo, "eval.safetensors"),
                                "--limit", "2", "--json"], capture_output=True, text=True, check=False)
            need(e.returncode == 0 and json.loads(e.stdout)["accept_len"] >= 1, f"eval: {e}")
            out = os.path.join(r.tmp, "out")
            e = subprocess.run([MILLRACE, "export", latest, out], capture_output=True, text=True, check=False)
            need(e.returncode == 0 and "model.safetensors" in os.listdir(out), f"export: {e}")
        finally:
            r.close()
    need(blobs[0] == blobs[1], "the final trainer.safetensors differ")
    need(by_position[0] == by_position[1], "the figures by position differ")


def kill_one(r, rnd):
    pids = r.pids()
    if not pids:
        return None
    name = rnd.choice(sorted(pids))
    try:
        os.kill(pids[name], signal.SIGKILL)
    except ProcessLookupError:
        return None
    return name


def settled_descriptors(r):
    """Descriptors of the supervisor, the same in five looks: it opens a checkpoint's files, or a starting actor's pipes, for moments."""
    def look():
        seen = set()
        try:
            for _ in range(5):
                seen.add(tuple(sorted(os.listdir(f"/proc/{r.proc.pid}/fd"))))
                time.sleep(0.03)
        except OSError:
            return -1                                           # the run is over
        return len(seen.pop()) if len(seen) == 1 else 0
    return wait_until(look, 10, "the supervisor's descriptors come to rest")


def case_kill():
    """30 kills at random times to random actors."""
    seed = int(os.environ.get("MR_SEED", time.time_ns() % 1000000))
    print(f"MR_SEED={seed}")
    rnd = random.Random(seed)
    r = Run("kill", rows=9000)
    try:
        r.start()
        r.reach(1, 30)
        fds = settled_descriptors(r)
        killed = []
        while len(killed) < 30 and r.proc.poll() is None:
            time.sleep(rnd.uniform(0.02, 0.3))
            name = kill_one(r, rnd)
            if name:
                killed.append(name)
        everybody = sum(a.get("count", 1) for a in r.data["actors"])
        wait_until(lambda: len(r.pids()) == everybody or r.proc.poll() is not None, 30, "all actors are back")
        if r.proc.poll() is None:
            now = settled_descriptors(r)
            need(now in (fds, -1), f"the supervisor had {fds} descriptors, then {now}: a leak")
        need(len(killed) == 30, f"the run was over after {len(killed)} kills: make it longer")
        r.must_end(0, "completed", 240)
        r.must_be_exact()
        r.must_be_acknowledged_once()
        s = r.summary()
        print(f"restarts {s['restarts']}, recomputed {s['microbatches_recomputed']}, kinds {sorted(set(k.split('/')[0] for k in killed))}")
        need(s["restarts"] >= 28, f"30 kills, {s['restarts']} restarts")
    finally:
        r.close()


def case_supervisor_kill():
    """kill -9 of the supervisor: all actors go, clean removes, resume completes; three times over."""
    r = Run("sup", rows=3000)
    try:
        for life in range(3):
            r.start(*(["--resume"] if life else []))
            target = 5 + 12 * life
            r.reach(target)
            pids = list(r.pids().values())
            need(len(pids) >= 4, f"actors: {pids}")
            r.proc.kill()
            r.proc.wait()
            wait_until(lambda p=pids: not any(alive(x) for x in p), 10, "all actors gone")
            s = r.status()
            need(s["state"] == "dead" and all(a["state"] == "dead" and a["wait"] is None for a in s["actors"]), f"status of a dead run: {s}")
            if life == 1:
                c = subprocess.run([MILLRACE, "clean"], capture_output=True, text=True, check=False)
                need(c.returncode == 0 and f"run {r.name}: its supervisor is gone; removed" in c.stdout, f"clean: {c}")
                need(not r.shm(), f"clean left {r.shm()}")
            else:
                need(r.shm(), "left-overs were expected")      # removed by the next start
        r.start("--resume")
        r.must_end(0, "completed")
        r.must_be_exact()
    finally:
        r.close()


def case_disk_full():
    """No room for a ledger line: the run waits, whole lines stay whole, and it goes on when there is room again."""
    r = Run("full", rows=1600)
    try:
        r.start()
        r.reach(3, 30)
        resource.prlimit(r.proc.pid, resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        time.sleep(0.3)
        before = r.step()
        time.sleep(0.7)
        need(r.proc.poll() is None and r.step() == before, f"step {before} -> {r.step()} without a ledger")
        need(all(line["items"] for line in r.ledger()), "a torn line")
        resource.prlimit(r.proc.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        r.must_end(0, "completed")
        r.must_be_exact()
    finally:
        r.close()


def case_ledger_removed():
    """A ledger that loses its name while the run writes it: the run fails, instead of completing without one."""
    r = Run("unlinked", rows=1600)
    try:
        r.start()
        r.reach(3, 30)
        os.unlink(os.path.join(r.dir, "ledger.jsonl"))
        need(r.wait(60) == 1 and "ledger.jsonl was removed" in r.text(), r.text()[-2000:])
        need(not r.shm(), f"left in /dev/shm: {r.shm()}")
    finally:
        r.close()


def case_resume_ahead():
    """Drafters may commit microbatches ahead of the plan.  Such a ledger resumes exactly, and with too few slabs it is refused with the arithmetic."""
    whole = Run("ahead-a", rows=400, train={"epochs": 1})
    r = Run("ahead-b", rows=400, train={"epochs": 1, "max_steps": 6})
    try:
        whole.start()
        whole.must_end(0, "completed")
        item = {i["item"]: i for line in whole.ledger() for i in line["items"]}
        r.start()
        r.must_end(0, "completed")
        n, m = 6, 4
        lines = r.ledger()
        old = lines[-1]["items"][0]
        new = next(item[p] for p in sorted(item) if p >= (n + 1) * m and item[p]["bucket"] == old["bucket"])
        lines[-1]["items"][0] = {**new, "drafter": old["drafter"]}
        with open(os.path.join(r.dir, "ledger.jsonl"), "w", encoding="utf-8") as f:
            f.writelines(json.dumps(line) + "\n" for line in lines)
        r.data["train"]["max_steps"] = 0
        r.data["queue"]["slabs_per_device"] = m
        r.save()
        p = subprocess.run([MILLRACE, "run", r.topo, "--resume"], capture_output=True, text=True, check=False)
        need(p.returncode == 2 and f"needs {m + 1} slabs: {m} for a step and 1 " in p.stderr, f"too few slabs: {p}")
        r.data["queue"]["slabs_per_device"] = m + 1
        r.save()
        r.start("--resume")
        r.must_end(0, "completed")
        items = sorted(i["item"] for line in r.ledger() for i in line["items"])
        need(items == sorted(item), "every microbatch exactly once, also after a ledger that is no prefix of the plan")
        r.data["data"]["token_budget"] = 512
        r.save()
        p = subprocess.run([MILLRACE, "run", r.topo, "--resume"], capture_output=True, text=True, check=False)
        need(p.returncode == 2 and "token_budget" in p.stderr, f"another plan must be refused: {p}")
        r.data["data"]["token_budget"] = 256
        r.data["train"]["epochs"] = 2
        for where, key, value in (("target", "layers", [1, 2]), ("drafter", "block_size", 4), ("drafter", "mask_token_id", 2), ("drafter", "rope_theta", 77.0)):
            was = r.data[where].get(key)
            r.data[where][key] = value
            r.save()
            p = subprocess.run([MILLRACE, "run", r.topo, "--resume"], capture_output=True, text=True, check=False)
            need(p.returncode == 2 and key in p.stderr and "another drafter" in p.stderr, f"another drafter must be refused: {p}")
            r.data[where].pop(key)
            if was is not None:
                r.data[where][key] = was
        r.save()
        trainer = os.path.join(r.dir, "latest", "trainer.safetensors")
        os.truncate(trainer, os.path.getsize(trainer) - 1)
        p = subprocess.run([MILLRACE, "run", r.topo, "--resume"], capture_output=True, text=True, check=False)
        need(p.returncode == 2 and "trainer.safetensors" in p.stderr and not r.shm(), f"a cut checkpoint must be refused before anything is started: {p}")
    finally:
        whole.close()
        r.close()


def case_clean_spares_the_living():
    r = Run("living", rows=800)
    try:
        r.start()
        r.reach(2, 30)
        before = sorted(r.shm())
        c = subprocess.run([MILLRACE, "clean"], capture_output=True, text=True, check=False)
        need(c.returncode == 0, f"clean: {c}")
        need(sorted(r.shm()) == before, "clean removed files of a live run")
        other = Run("living")                                  # the same name, elsewhere
        other.name = r.name
        other.data["run"]["name"] = r.name
        other.save()
        second = subprocess.run([MILLRACE, "run", other.topo], capture_output=True, text=True, check=False)
        need(second.returncode == 2 and "is live" in second.stderr, f"a live name must be refused: {second}")
        shutil.rmtree(other.tmp)
        r.must_end(0, "completed")
        r.must_be_exact()
    finally:
        r.close()


def case_garbage():
    """What has the name of a run's segment and is none: each command says so at once, in one line, with what to do about it."""
    r = Run("garbage", rows=40)
    path = f"/dev/shm/millrace-{r.name}.ctl"

    def ask(*args):
        c = subprocess.run([MILLRACE, *args], capture_output=True, text=True, check=False, timeout=30 * SLOW)
        return c.returncode, c.stdout, c.stderr

    def write(text, age):
        with open(path, "wb") as f:
            f.write(text)
        os.utime(path, (time.time() - age, time.time() - age))

    kinds = [
        ("garbage", lambda: write(os.urandom(100000), 0), "(100000 bytes) is no segment of a run", "millrace clean", os.unlink),
        ("old garbage", lambda: write(os.urandom(100000), 60), "(100000 bytes) is no segment of a run", "millrace clean", os.unlink),
        ("empty", lambda: write(b"", 60), "(0 bytes) is no segment of a run", "millrace clean", os.unlink),
        ("directory", lambda: os.mkdir(path), "is a directory", "rm -r ", os.rmdir),
        ("symbolic link", lambda: os.symlink(r.topo, path), "is a symbolic link", "rm ", os.unlink),
        ("pipe", lambda: os.mkfifo(path), "is a pipe", "rm ", os.unlink),
    ]
    try:
        for what, make, words, advice, remove in kinds:
            make()
            for args in (["status", r.name], ["stop", r.name], ["restart", r.name, "drafter/0"], ["inspect", r.name], ["run", r.topo]):
                if what in ("old garbage", "empty") and args[0] == "run":
                    continue                                    # removes it and runs: below
                code, _, err = ask(*args)
                need(code == 3 and err.count("\n") == 1, f"{what}, {args}: exit code {code}, {err}")
                need(path in err and words in err and advice in err, f"{what}, {args}: {err}")
            need(not os.path.exists(r.dir), f"{what}: something was started")
            if what not in ("old garbage", "empty"):
                code, out, _ = ask("clean")
                need(code == 0 and words in out and "left alone" in out and os.path.lexists(path), f"{what}: clean says {out}")
            else:
                code, out, _ = ask("clean")
                need(code == 0 and "removed 1 file" in out and not os.path.lexists(path), f"{what}: clean says {out}")
                continue
            remove(path)
        write(b"garbage", 60)
        r.start()
        r.must_end(0, "completed")
        need("removed 1 file" in r.text(), r.text())
    finally:
        if os.path.lexists(path):
            remove(path)
        r.close()


def case_stop():
    """stop, SIGTERM, two SIGINTs, stop --now; resume after each."""
    r = Run("stop", rows=4000)
    try:
        r.start()
        r.reach(3, 30)
        c = subprocess.run([MILLRACE, "stop", r.name], capture_output=True, text=True, check=False)
        need(c.returncode == 0, f"stop: {c}")
        r.must_end(0, "stopped")
        r.must_be_acknowledged_once()
        s = r.summary()
        need(os.readlink(os.path.join(r.dir, "latest")) == f"checkpoints/step-{s['steps']}", "the checkpoint of a stop")
        for sigs, code, status in (([signal.SIGTERM], 0, "stopped"), ([signal.SIGHUP], 0, "stopped"), ([signal.SIGINT, signal.SIGINT], 130, "interrupted"), ("now", 143, "interrupted")):
            before = r.summary()["steps"]
            r.start("--resume")
            r.reach(before + 2)
            if sigs == "now":
                subprocess.run([MILLRACE, "stop", r.name, "--now"], check=True, capture_output=True)
            else:
                if len(sigs) > 1:                               # else the run may be over before the second one
                    os.kill(r.pids()["drafter/0"], signal.SIGSTOP)
                for sig in sigs:
                    asked = r.text().count("once more: stop now")
                    os.killpg(r.proc.pid, sig)
                    if len(sigs) > 1:
                        wait_until(lambda n=asked: r.text().count("once more: stop now") > n or r.proc.poll() is not None, 10, "the first signal is heard")
            r.must_end(code, status)
            r.must_pass_ledger_check()
        r.start("--resume")
        r.must_end(0, "completed")
        r.must_be_exact()
    finally:
        r.close()


def case_descriptors():
    """An actor inherits its standard streams, the eventfd and the read end of the death pipe: nothing else of the supervisor's."""
    r = Run("fds", rows=1600, train={"checkpoint_every_steps": 0})      # while a drafter writes one, it has an io_uring of its own
    try:
        r.start()
        r.reach(2, 30)
        for name, pid in r.pids().items():
            links = {}
            for fd in os.listdir(f"/proc/{pid}/fd"):
                try:
                    links[int(fd)] = os.readlink(f"/proc/{pid}/fd/{fd}")
                except OSError:
                    pass                                       # its own, closed meanwhile
            need(links[0] == "/dev/null" and links[1] == links[2] and links[1].startswith("pipe:"), f"{name}: {links}")
            bad = [v for v in links.values() if v.startswith("socket:") or re.search(r"io_uring|signalfd|timerfd|pidfd|eventpoll", v)]
            need(not bad, f"{name} inherited {bad}")
            need(len({v for v in links.values() if v.startswith("pipe:")}) == 2, f"{name}: pipes in {links}")
            pipes = [fd for fd, v in links.items() if v.startswith("pipe:") and fd > 2]
            for fd in pipes:
                with open(f"/proc/{pid}/fdinfo/{fd}", encoding="utf-8") as f:
                    flags = int(re.search(r"flags:\s+(\d+)", f.read()).group(1), 8)
                need(flags & os.O_ACCMODE == os.O_RDONLY, f"{name} holds a write end of the death pipe")
        r.must_end(0, "completed")
    finally:
        r.close()


def case_sigterm_at_start():
    """A SIGTERM at any time of the start ends in an orderly way: nothing left, no orphan."""
    for ms in (0, 2, 5, 10, 20, 40, 80, 160):
        r = Run(f"start{ms}")
        try:
            r.start()
            time.sleep(ms / 1000)
            r.proc.terminate()
            time.sleep(0.02)
            if r.proc.poll() is None:
                r.proc.terminate()
            code = r.wait()
            need(code in (0, 143, -signal.SIGTERM), f"exit code {code} after {ms} ms")
            need(not r.shm(), f"left in /dev/shm after {ms} ms: {r.shm()}")
        finally:
            r.close()


def case_restart():
    r = Run("restart", rows=2400)
    try:
        r.start()
        r.reach(2, 30)
        for args in (["drafter/0"], ["drafter/1", "--kill"], ["target/0"], ["target/1", "--kill"], ["feeder/0"], ["feeder/0", "--kill"]):
            before = {a["name"]: a for a in r.status()["actors"]}
            c = subprocess.run([MILLRACE, "restart", r.name, *args], capture_output=True, text=True, check=False)
            need(c.returncode == 0, f"restart {args}: {c}\n{r.text()[-1500:]}")
            after = {a["name"]: a for a in r.status()["actors"]}
            need(after[args[0]]["incarnation"] == before[args[0]]["incarnation"] + 1, f"{args}: {after[args[0]]}")
            need(all(after[n]["incarnation"] == before[n]["incarnation"] for n in after if n != args[0]), "another actor was restarted too")
            print(c.stdout.strip(), "first claim:", after[args[0]]["first_claim_s"])
        bad = subprocess.run([MILLRACE, "restart", r.name, "draftr/0"], capture_output=True, text=True, check=False)
        need(bad.returncode == 1 and "drafter/0" in bad.stderr, f"unknown actor: {bad}")
        r.must_end(0, "completed")
        r.must_be_exact()
        need(r.summary()["restarts"] == 3, f"drains are no deaths: {r.summary()['restarts']} restarts")
    finally:
        r.close()


def script(path, text):
    with open(path, "w", encoding="utf-8") as f:
        f.write("#!/bin/sh\n" + text)
    os.chmod(path, 0o755)
    return path


def case_failing_actor():
    """Budget and back-off; a refusal of the configuration; a program that cannot be executed."""
    r = Run("fail")
    try:
        bad = script(os.path.join(r.tmp, "actor"), 'echo "raw words of a library" >&2\nexit 1\n')
        t0 = time.monotonic()
        r.start(env={"MILLRACE_ACTOR": bad})
        r.must_end(1, "failed")
        need(time.monotonic() - t0 >= 0.05 + 0.1 + 0.2 + 0.4, "restarts without back-off")
        text = r.text()
        need("--resume" in text and "restart.max is 5" in text and "raw words of a library" in text, f"message: {text}")
        need(r.summary()["microbatches_committed"] == 0, "nothing was committed")
        shutil.rmtree(r.dir)
        script(bad, "exit 2\n")
        r.start(env={"MILLRACE_ACTOR": bad})
        r.must_end(1, "failed")
        need(max(e["msg"].count("incarnation 2") for e in r.log()) == 0, "a configuration error must not be restarted")
        shutil.rmtree(r.dir)
        with open(bad, "w", encoding="utf-8") as f:
            f.write("#!/no/such/interpreter\n")
        r.start(env={"MILLRACE_ACTOR": bad})
        r.must_end(1, "failed")
        need("No such file" in r.text(), "the errno of exec")
        shutil.rmtree(r.dir)
        r.start(env={"MILLRACE_ACTOR": "/no/such/actor"})
        r.must_end(3)
        need(not os.path.exists(r.dir), "refused before the run directory is made")
    finally:
        r.close()


def case_no_room_for_checkpoints():
    """Drafters that get microbatches done and then cannot write: the run ends after a few tries, not after hours of restarts."""
    r = Run("noroom")
    try:
        shim = script(os.path.join(r.tmp, "actor"), f"""
[ "$4" -ge 3 ] && ulimit -f 1
exec {os.path.join(BIN, "millrace-actor")} "$@"
""")
        r.start(env={"MILLRACE_ACTOR": shim})
        r.must_end(1, "failed")
        need("restart.max is 5" in r.text() and "--resume" in r.text(), f"message: {r.text()}")
        need(r.summary()["restarts"] <= 16, f"restarts: {r.summary()['restarts']}")
        r.start("--resume")
        r.must_end(0, "completed")
        r.must_be_exact()
    finally:
        r.close()


def case_backoff():
    """An actor that dies three times while starting comes back after its back-off and is left in peace."""
    r = Run("backoff")
    try:
        count = os.path.join(r.tmp, "count")
        shim = script(os.path.join(r.tmp, "actor"), f"""
if [ "$4" = 3 ] && [ "$(cat {count} 2>/dev/null | wc -c)" -lt 3 ]; then echo -n x >>{count}; exit 1; fi
exec {os.path.join(BIN, "millrace-actor")} "$@"
""")
        r.start(env={"MILLRACE_ACTOR": shim})
        r.must_end(0, "completed")
        r.must_be_exact()
        need(r.summary()["restarts"] == 3, f"restarts: {r.summary()['restarts']}\n{r.text()}")
    finally:
        r.close()


def case_target_bytes():
    """A checkpoint with the same shapes and other bytes is another target: for --resume, and for an incarnation of the same run.  A moved one is not."""
    demo = os.path.join(os.path.dirname(HERE), "demo", "target")
    r = Demo("bytes", max_steps=12, checkpoint_every_steps=4)
    one, two = os.path.join(r.tmp, "one"), os.path.join(r.tmp, "two")
    for d in (one, two):
        os.mkdir(d)
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(os.path.join(demo, name), os.path.join(d, name))
    size = os.path.getsize(os.path.join(two, "model.safetensors"))
    with open(os.path.join(two, "model.safetensors"), "r+b") as f:  # the second half: what another training would have changed
        f.seek(size // 2)
        half = f.read()
        f.seek(size // 2)
        f.write(bytes(b ^ 1 for b in half))
    try:
        r.data["target"]["checkpoint"] = one
        r.save()
        r.start()
        r.reach(4, 120)
        os.replace(os.path.join(two, "model.safetensors"), os.path.join(one, "model.safetensors"))
        os.kill(r.pids()["target/0"], signal.SIGKILL)
        need(r.wait(120) == 1, r.text())
        need("are not those that this run was started with" in r.text() and one in r.text(), r.text())
        p = subprocess.run([MILLRACE, "run", r.topo, "--resume"], capture_output=True, text=True, check=False)
        need(p.returncode == 2 and "/drafter/target_weights" in p.stderr and "same shapes" in p.stderr, f"another target must be refused: {p}")
        r.data["target"]["checkpoint"] = demo                   # the same bytes, elsewhere
        r.save()
        r.start("--resume")
        r.must_end(0, "completed", 300)
    finally:
        r.close()


def case_data_bytes():
    """Other rows under the name of the data: an incarnation of the feeder that finds them ends the run, and --resume refuses them."""
    r = Run("data", us=20000)
    rows = os.path.join(r.tmp, "rows.jsonl")

    def write(seed):
        lengths, rnd = random.Random(7), random.Random(seed)    # the same plan, other tokens
        with open(rows + ".new", "w", encoding="utf-8") as f:
            for _ in range(400):
                n = lengths.randint(20, 100)
                f.write(json.dumps({"input_ids": [rnd.randint(0, 255) for _ in range(n)], "loss_mask": [1] * n}) + "\n")
        os.replace(rows + ".new", rows)

    try:
        write(1)
        r.data["data"]["train"] = rows
        r.data["train"]["epochs"] = 3
        r.save()
        r.start()
        r.reach(2, 60)
        write(2)
        os.kill(r.pids()["feeder/0"], signal.SIGKILL)
        need(r.wait(120) == 1, r.text())
        need("the rows are not those that this run was started with" in r.text() and rows in r.text(), r.text())
        p = subprocess.run([MILLRACE, "run", r.topo, "--resume"], capture_output=True, text=True, check=False)
        need(p.returncode == 2 and "/data" in p.stderr and "its rows" in p.stderr, f"other rows must be refused: {p}")
        write(1)
        r.start("--resume", "--set", "/train/max_steps=12")
        r.must_end(0, "completed")
    finally:
        r.close()


def case_hang():
    """An actor that stops is killed after hang_s, and the run goes on."""
    r = Run("hang", rows=1200, restart={"hang_s": 2})
    try:
        r.start()
        r.reach(2, 30)
        pid = r.pids()["drafter/0"]
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: not alive(pid), 30, "the stopped drafter is killed")
        r.must_end(0, "completed")
        r.must_be_exact()
        need(any("killing it" in e["msg"] and e["actor"] == "drafter/0" for e in r.log()), "the kill is named in the log")
    finally:
        r.close()


def case_pause():
    """Pauses shorter than hang_s change nothing: nobody is declared dead by time."""
    r = Run("pause", rows=800)
    try:
        r.start()
        r.reach(2)
        for name, pid in r.pids().items():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.5)
            s = r.status()
            os.kill(pid, signal.SIGCONT)
            need(not s or any(a["name"] == name and a["state"] == "stopped" for a in s["actors"]), f"{name} is stopped: {s}")
            if r.proc.poll() is not None:
                break
        r.must_end(0, "completed")
        r.must_be_exact()
        need(r.summary()["restarts"] == 0, "a pause was taken for a death")
    finally:
        r.close()


def case_two_runs():
    """Two runs beside each other: stopping, killing and inspecting one does not touch the other."""
    a, b = Run("two-a", rows=2400), Run("two-b", rows=2400)
    try:
        a.start()
        b.start()
        a.reach(2)
        b.reach(2)
        p = subprocess.run([MILLRACE, "stop"], capture_output=True, text=True, check=False)
        need(p.returncode == 2 and "name one" in p.stderr, f"which of them: {p}")
        p = subprocess.run([MILLRACE, "inspect", a.name], capture_output=True, text=True, check=False)
        need(p.returncode == 0 and "drafter/1" in p.stdout, f"inspect: {p}")
        a.proc.kill()
        a.proc.wait()
        need(a.status()["state"] == "dead", f"status of a dead run: {a.status()}")
        p = subprocess.run([MILLRACE, "restart", a.name, "drafter/0"], capture_output=True, text=True, check=False)
        need(p.returncode == 1 and "does not answer" in p.stderr, f"restart in a dead run: {p}")
        subprocess.run([MILLRACE, "clean"], check=True, capture_output=True)
        need(not a.shm() and b.shm(), "clean took the wrong run")
        b.must_end(0, "completed")
        b.must_be_exact()
        need(b.summary()["restarts"] == 0, "the other run was hit")
    finally:
        a.close()
        b.close()


def case_fault_points():
    """The supervisor dies at each of its own points; what is left resumes to an exact end."""
    for point in ("sup.recover.begin", "sup.recover.done"):
        r = Run("point-" + point.replace(".", "-"), rows=1200)
        try:
            r.start(env={"MR_FAULT": f"{point}:1:supervisor"})
            r.reach(3, 30)
            os.kill(r.pids()["drafter/0"], signal.SIGKILL)
            if r.wait() == 0:
                print("SKIP: built without fault points")
                return 77
            r.start("--resume")
            r.must_end(0, "completed")
            r.must_be_exact()
        finally:
            r.close()
    points = ["sup.segments.before", "sup.segments.created", "sup.spawn.forked", "sup.spawned", "sup.ledger.written", "sup.ledger.done",
              "sup.ledger.synced", "sup.latest.switched", "sup.finish.begin", "sup.finish.done", "sup.death.reaped"]
    for point in points:
        r = Run("point-" + point.replace(".", "-"), rows=200)
        try:
            n = 3 if "ledger" in point and "synced" not in point else 1
            r.start(env={"MR_FAULT": f"{point}:{n}:supervisor"})
            code = r.wait()
            if code == 0:
                print("SKIP: built without fault points")
                return 77
            need(code == -signal.SIGKILL, f"{point}: exit code {code}\n{r.text()[-1500:]}")
            r.start("--resume")
            r.must_end(0)
            need("complete" in r.text(), f"{point}: {r.text()[-500:]}")
            if point != "sup.finish.done" or os.path.exists(os.path.join(r.dir, "summary.json")):
                r.must_be_exact()
            print(point, "ok")
        finally:
            r.close()
    return 0


def case_metrics():
    r = Run("metrics", rows=1200, metrics={"listen": "127.0.0.1:0"})
    port = random.randrange(20000, 50000)
    r.data["metrics"]["listen"] = f"127.0.0.1:{port}"
    r.save()
    try:
        r.start()
        r.reach(2, 30)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as f:
            text = f.read().decode()
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        need(float(values["millrace_steps"]) >= 2, text)
        need(0 <= float(values["millrace_accuracy"]) <= 1, text)
        for k in range(1, 8):                                   # a third of a synthetic microbatch's labels is right, each costs 2 nats
            need(0 < float(values[f'millrace_position_accuracy{{position="{k}"}}']) < 1, text)
            need(float(values[f'millrace_position_loss{{position="{k}"}}']) == 2, text)
        need(values['millrace_actor_up{actor="drafter/0"}'] == "1", text)
        for line in text.splitlines():
            need(re.match(r'(# (HELP|TYPE) millrace_\w+ .+|millrace_\w+(\{(\w+="[^"]*",?)+\})? [-+.0-9eE]+)$', line), f"not Prometheus text: {line}")
        r.must_end(0, "completed")
        r.must_add_up_by_position(r.summary()["steps"])
        name = next(n for n in os.listdir(os.path.join(r.dir, "metrics")) if n.startswith("events.out.tfevents."))
        with open(os.path.join(r.dir, "metrics", name), "rb") as f:
            tags = set(re.findall(rb"train/pos_(?:acc|loss)/\d+", f.read()))
        need(tags == {b"train/pos_%s/%d" % (what, k) for what in (b"acc", b"loss") for k in (1, 2, 4, 7)}, f"TensorBoard tags: {tags}")
    finally:
        r.close()


def case_links():
    """The supervisor links neither CUDA nor NCCL nor a BLAS."""
    out = subprocess.run(["readelf", "-d", MILLRACE], capture_output=True, text=True, check=False)
    if out.returncode:
        print("SKIP: no readelf")
        return 77
    libs = re.findall(r"\(NEEDED\).*\[(.*)\]", out.stdout)
    need(libs, "no NEEDED entries found")
    bad = [lib for lib in libs if re.match(r"lib(cuda|cudart|nccl|cublas|dnnl|openblas|blas|mkl)", lib)]
    need(not bad, f"millrace links {bad}")
    return 0


def case_usage():
    """Exit codes and one-line hints; help; pack."""
    tmp = tempfile.mkdtemp(prefix="mr-e2e-")
    rows, packed = os.path.join(tmp, "rows.jsonl"), os.path.join(tmp, "rows.safetensors")
    with open(rows, "w", encoding="utf-8") as f:
        f.write('{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}\n' * 3)
    p = subprocess.run([MILLRACE, "pack", rows, packed], capture_output=True, text=True, check=False)
    need(p.returncode == 0 and os.path.getsize(packed) > 0 and p.stdout, f"pack: {p}")
    with open(rows, "a", encoding="utf-8") as f:
        f.write('{"input_ids": [1, 2')
    p = subprocess.run([MILLRACE, "pack", rows, packed], capture_output=True, text=True, check=False)
    need(p.returncode == 2 and "rows.jsonl:4" in p.stderr, f"pack of a cut line: {p}")
    shutil.rmtree(tmp)

    def run(*args):
        return subprocess.run([MILLRACE, *args], capture_output=True, text=True, check=False)
    for args in ([], ["chekc"], ["run"], ["run", "a", "b"], ["check", "--sett", "x", "a"], ["status", "--json=1"], ["run", "x.json", "--io", "kqueue"],
                 ["status", "no-such-run"], ["restart"], ["-x"], ["check", "/no/such/file.json"], ["pack", "one"]):
        r = run(*args)
        need(r.returncode == 2, f"{args}: exit code {r.returncode}: {r.stdout}{r.stderr}")
        need(r.stderr.count("\n") == 1 and r.stderr.startswith("millrace: "), f"{args}: one line of hint, got {r.stderr!r}")
    need("did you mean check" in run("chekc").stderr, "nearest command")
    need("did you mean --set" in run("check", "--sett", "x", "a").stderr, "nearest option")
    for args in (["--help"], ["--version"], ["run", "--help"], ["status", "-h"], ["eval", "--help"], ["export", "--help"], ["clean"], ["doctor"]):
        r = run(*args)
        need(r.returncode == 0 and r.stdout, f"{args}: {r}")
    with open("/dev/full", "w", encoding="utf-8") as full:          # what cannot be written was not done
        for args in (["doctor"], ["--version"], ["status", "--help"]):
            c = subprocess.run([MILLRACE, *args], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
            need(c.returncode == 3 and "standard output" in c.stderr, f"{args} to a full disk: {c}")


def refused(r, code, *words, command="check", args=()):
    """One clear message, the exit code, and nothing started."""
    p = subprocess.run([MILLRACE, command, r.topo, *args], capture_output=True, text=True, check=False)
    lines = [x for x in p.stderr.splitlines() if x]
    need(p.returncode == code, f"{words}: exit code {p.returncode}, expected {code}: {p.stdout[-800:]}{p.stderr}")
    need(len(lines) >= 1 and lines[0].startswith("millrace: "), f"{words}: {p.stderr!r}")
    for w in words:
        need(w in p.stderr, f"message lacks {w!r}: {p.stderr}")
    need(not r.shm() and not os.path.exists(r.dir), f"{words}: something was started")


def case_check():
    """Bad topologies, data and machines: refused by `check` and by `run` in the same words, before anything exists."""
    def with_(path, value, tag="bad"):
        r = Run(tag)
        node = r.data
        for key in path[:-1]:
            node = node[key]
        if value is None:
            del node[path[-1]]
        else:
            node[path[-1]] = value
        r.save()
        return r

    def real_model(path):
        r = Run("bad")
        r.data["target"]["checkpoint"] = path
        for a in r.data["actors"]:
            for key in ("engine", "us_per_item", "us_per_token"):
                a.pop(key, None)
        r.save()
        return r

    def write(r, text):
        with open(r.topo, "w", encoding="utf-8") as f:
            f.write(text)
        return r

    rows = os.path.join(tempfile.mkdtemp(prefix="mr-e2e-"), "rows.jsonl")
    with open(rows, "w", encoding="utf-8") as f:
        f.write(json.dumps({"input_ids": [1, 2, 3, 4], "loss_mask": [1, 1, 1, 1]}) + "\n" + json.dumps({"input_ids": [1, 2, 999], "loss_mask": [1, 1, 1]}) + "\n")
    full = json.dumps(topology("x", "/tmp/none"))
    cases = [
        (with_(["train", "lrr"], 1), 2, ["lrr", "lr", "topo.json:1:"]),
        (with_(["train", "lr"], "fast"), 2, ["/train/lr", "topo.json:1:"]),
        (with_(["train", "lr"], None), 2, ["/train", "lr"]),
        (with_(["queue", "slabs_per_device"], 3), 2, ["/queue/slabs_per_device", "4", "3"]),
        (with_(["data", "train"], rows), 2, ["rows.jsonl:2", "999"]),
        (with_(["data", "train"], "/no/such.jsonl"), 2, ["/no/such.jsonl"]),
        (real_model("/no/such/model"), 2, ["/no/such/model"]),
        (with_(["run", "name"], "a/b"), 2, ["/run/name"]),
        (with_(["data", "buckets"], [64, 32]), 2, ["/data/buckets"]),
        (write(Run("bad"), full[:-1] + ', "run": {}}'), 2, ["run"]),
        (write(Run("bad"), full[:-1]), 2, ["topo.json:1:"]),
        (write(Run("bad"), ""), 2, ["topo.json"]),
    ]
    for r, code, words in cases:
        try:
            refused(r, code, *words)
            refused(r, code, *words, command="run")
        finally:
            r.close()
    shutil.rmtree(os.path.dirname(rows))
    r = Run("big")
    try:
        refused(r, 3, "/dev/shm is too small", "needed", "available", args=["--set", "/queue/slabs_per_device=3000", "--set", "/data/token_budget=4000000"])
        refused(r, 3, "/dev/shm is too small", command="run", args=["--set", "/queue/slabs_per_device=3000", "--set", "/data/token_budget=4000000"])
        refused(r, 2, "/metrics/listen", command="check", args=["--set", "/metrics/listen=7"])
        for where, code in (("localhost:9464", 2), ("192.0.2.1:9464", 3)):  # a name; an address that no machine has (RFC 5737)
            for command in ("check", "run"):
                refused(r, code, "/metrics/listen", where, command=command, args=["--set", f'/metrics/listen="{where}"'])
        refused(r, 2, "--set", args=["--set", "nonsense"])
        for where in (r.topo, r.topo + "/a/b"):                     # a file, below a file
            for command in ("check", "run"):
                refused(r, 3, "/run/dir", where, "Not a directory", command=command, args=["--set", "/run/dir=" + json.dumps(where)])
        refused(r, 2, "name", command="run", args=["--name", "no good"])
        p = subprocess.run([MILLRACE, "check", r.topo], capture_output=True, text=True, check=False)
        need(p.returncode == 0 and "/dev/shm" in p.stdout and not os.path.exists(r.dir), f"a good topology: {p}")
        r.start("--name", r.name + "-b", "--set", "/train/max_steps=3", "--set", "/run/dir=" + json.dumps(r.dir))
        r.must_end(0, "completed")
        need(r.summary()["steps"] == 3 and r.summary()["microbatches_committed"] == 12, "max_steps")
        with open(os.path.join(r.dir, "topology.json"), encoding="utf-8") as f:
            need(json.load(f)["run"]["name"] == r.name + "-b", "--name in the resolved topology")
    finally:
        r.close()


CASES = {name[5:]: fn for name, fn in list(globals().items()) if name.startswith("case_")}


def main(argv):
    global BIN, MILLRACE
    if len(argv) != 3 or argv[2] not in CASES:
        print(__doc__ + "cases: " + " ".join(CASES), file=sys.stderr)
        return 2
    BIN = os.path.abspath(argv[1])
    MILLRACE = os.path.join(BIN, "millrace")
    os.environ.pop("MILLRACE_ACTOR", None)
    try:
        return CASES[argv[2]]() or 0
    except AssertionError as e:
        print(f"FAILED: {e}")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv))
