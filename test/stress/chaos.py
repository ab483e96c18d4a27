#!/usr/bin/env python3
"""Soak: random topologies, random kills, pauses, restarts, stops and resumes, until the time is over; standard library only.

usage: chaos.py BIN_DIR [--seconds N] [--seed S] [--quiet]
The seed is printed first; the same seed makes the same topologies and the same kinds of trouble (their exact instants belong to the
machine).  After each run: exit code, every microbatch in exactly one ledger line, bucket mix, weights as the ledger says, sentinels, and
nothing left in /dev/shm.  While a run lives, the supervisor's descriptors and memory must stay where they were.
"""
import os
import random
import signal
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
sys.path.insert(0, HERE)
import e2e_runtime as e2e   # noqa: E402
import exact                # noqa: E402


def random_run(rnd, number):
    targets, drafters, accum = rnd.randint(1, 5), rnd.randint(1, 4), rnd.choice((1, 1, 2, 3, 5))
    places = drafters * accum
    r = e2e.Run(f"chaos{number}", rows=rnd.randint(40, 1200), targets=targets, drafters=drafters, us=rnd.choice((200, 1000, 4000)))
    d = r.data
    d["run"]["seed"] = rnd.randint(0, 1 << 30)
    d["train"].update(epochs=rnd.randint(1, 4), grad_accum=accum, checkpoint_every_steps=rnd.choice((0, 1, 3, 10, 50)),
                      keep_checkpoints=rnd.randint(1, 3), deterministic=rnd.random() < 0.4)
    d["queue"]["slabs_per_device"] = rnd.choice((places, places + 1, 2 * places, 3 * places + 2))
    d["data"]["buckets"] = rnd.choice(([128], [32, 128], [32, 64, 128], [24, 40, 56, 80, 104, 128]))
    d["restart"].update(max=50, backoff_ms=rnd.choice((1, 50)), hang_s=20)
    for actor in d["actors"][1:]:
        actor["jitter"] = rnd.choice((0, 0.5))
    r.save()
    return r


def descriptors(pid):
    """(open descriptors, resident KiB) of a process; (0, 0) when it is gone."""
    try:
        with open(f"/proc/{pid}/statm", encoding="utf-8") as f:
            return len(os.listdir(f"/proc/{pid}/fd")), int(f.read().split()[1]) * 4
    except OSError:
        return 0, 0


def signal_one(r, rnd, sig):
    pids = r.pids()
    if not pids:
        return 0
    pid = pids[rnd.choice(sorted(pids))]
    try:
        os.kill(pid, sig)
        return pid
    except ProcessLookupError:
        return 0


def pause(r, rnd):
    """A stopped actor is not a dead one: shorter than restart.hang_s it must change nothing."""
    pid = signal_one(r, rnd, signal.SIGSTOP)
    if pid:
        time.sleep(rnd.uniform(0.05, 3))
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass


def restart(r, rnd):
    pids = r.pids()
    if pids:
        args = [e2e.MILLRACE, "restart", r.name, rnd.choice(sorted(pids))] + (["--kill"] if rnd.random() < 0.5 else [])
        subprocess.run(args, capture_output=True, check=False)


def burst(r, rnd):
    for _ in range(rnd.randint(2, 6)):
        signal_one(r, rnd, signal.SIGKILL)


TROUBLE = ((10, "kill", lambda r, rnd: signal_one(r, rnd, signal.SIGKILL)), (3, "burst", burst), (2, "pause", pause), (3, "restart", restart),
           (1, "supervisor", lambda r, rnd: r.proc.kill()), (1, "stop", lambda r, rnd: r.proc.send_signal(signal.SIGTERM)))


def live(r, rnd, count, end):
    """Trouble until the run ends.  Returns the largest growth of the supervisor (descriptors)."""
    base, grown = None, 0
    while r.proc.poll() is None:
        time.sleep(rnd.uniform(0.01, 0.4))
        now = descriptors(r.proc.pid)
        if base is None and r.step() >= 1:
            base = descriptors(r.proc.pid)
        if base and now[0]:
            grown = max(grown, now[0] - base[0])
        if time.monotonic() > end:
            continue                                    # time is over: let it finish in peace
        weights = [w for w, _, _ in TROUBLE]
        _, name, act = rnd.choices(TROUBLE, weights)[0]
        count[name] = count.get(name, 0) + 1
        act(r, rnd)
    return grown


def one(rnd, number, count, end):
    r = random_run(rnd, number)
    allowed = 3 * len(r.data["actors"]) + 12 + 3 * sum(a.get("count", 1) for a in r.data["actors"])
    try:
        r.start()
        while True:
            grown = live(r, rnd, count, end)
            e2e.need(grown <= allowed, f"the supervisor grew by {grown} descriptors")
            code = r.proc.wait()
            # killed, or interrupted: by its own choice, or before it had a handler (then it had started nothing)
            e2e.need(code in (0, -signal.SIGKILL, 143, 130, -signal.SIGTERM), f"exit code {code}\n{r.text()[-3000:]}")
            if code == 0 and r.summary()["status"] == "completed":
                break
            r.start("--resume")
        r.must_end(0, "completed")
        r.must_be_exact()
        wrong = exact.weights_violation(r.dir)
        e2e.need(not wrong, wrong)
        count["restarts"] = count.get("restarts", 0) + r.summary()["restarts"]
        return r.summary()["microbatches_total"]
    except AssertionError:
        print(f"run {number}: {open(r.topo, encoding='utf-8').read()}")
        raise
    finally:
        r.close()


def main(argv):
    seconds, seed, quiet = 120.0, time.time_ns() % 1000000007, "--quiet" in argv
    args = [a for a in argv[1:] if a != "--quiet"]
    while len(args) > 2:
        value, key = args.pop(), args.pop()
        if key == "--seconds":
            seconds = float(value)
        elif key == "--seed":
            seed = int(value)
        else:
            args = []
    if len(args) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    print(f"chaos: seed {seed}", flush=True)
    e2e.BIN = os.path.abspath(args[0])
    e2e.MILLRACE = os.path.join(e2e.BIN, "millrace")
    begun = time.monotonic()
    end, number, count, total = begun + seconds, 0, {}, 0
    while time.monotonic() < end:
        try:
            total += one(random.Random(seed * 1000003 + number), number, count, end)
        except AssertionError as e:
            print(f"chaos: FAILED in run {number} of seed {seed}: {e}")
            return 1
        number += 1
        if not quiet:
            print(f"chaos: {number} runs, {total} microbatches, {time.monotonic() - begun:.0f} s, {count}", flush=True)
    print(f"chaos: seed {seed}: {number} runs, {total} microbatches, {time.monotonic() - begun:.0f} s, {count}: all exact")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
