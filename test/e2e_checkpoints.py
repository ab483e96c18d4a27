#!/usr/bin/env python3
"""Whole runs and what they leave in checkpoints/; standard library only.

usage: e2e_checkpoints.py BIN_DIR CASE FAKE_ACTOR      exit 0 = passed, 1 = failed, 77 = cannot run here
"""
import json
import os
import shutil
import subprocess
import sys

import e2e_gpu
import e2e_runtime as e2e
from e2e_gpu_drafters import All
from e2e_runtime import Run, need

FILES = ("config.json", "model.safetensors", "trainer.safetensors", "state.json")


def files(where):
    out = {}
    for name in FILES:
        with open(os.path.join(where, name), "rb") as f:
            out[name] = f.read()
    return out


def state(where):
    return json.loads(files(where)["state.json"])


def case_epoch():
    """state.json says which epoch comes next: that of the step's ledger line; at the end of all, their number; also when max_steps ends the run."""
    r = Run("epoch", rows=100, train={"checkpoint_every_steps": 1, "keep_checkpoints": 1000})
    try:
        r.start()
        r.must_end(0, "completed")
        lines, n = r.ledger(), r.summary()["steps"]
        epochs = [x["epoch"] for x in lines] + [2]
        first = epochs.count(0)
        need(1 < first < n - 1, f"steps by epoch: {epochs}")
        for step in range(1, n + 1):
            where = os.path.join(r.dir, "checkpoints", f"step-{step}")
            if os.path.exists(where):                           # one that was due while another was written is left out
                s = state(where)
                need((s["step"], s["epoch"]) == (step, epochs[step]), f"{s}, wanted epoch {epochs[step]}")
        need(state(os.path.join(r.dir, "latest"))["epoch"] == 2, "the end of the last epoch")
        for steps in (first - 1, first, n - 1):
            shutil.rmtree(r.dir)
            r.data["train"]["max_steps"] = steps
            r.save()
            r.start()
            r.must_end(0, "completed")
            s = state(os.path.join(r.dir, "latest"))
            need((s["step"], s["epoch"]) == (steps, epochs[steps]), f"max_steps {steps}: {s}, wanted epoch {epochs[steps]}")
    finally:
        r.close()


def pages(where):
    return sum((os.path.getsize(os.path.join(where, f)) + 4095) // 4096 for f in os.listdir(where))


MOUNT = """
set -e
mkdir -p "$1/checkpoints"
mount -t tmpfs -o size="$2" none "$1/checkpoints"
rc=0
"$3" run "$4" || rc=$?
cp -a "$1/checkpoints" "$5"
exit "$rc"
"""


def case_full():
    """The disk has room for one checkpoint and not for the next: one clear message, no half checkpoint under a name, `latest` whole."""
    if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], check=False, capture_output=True).returncode:
        print("skipped: no mounts in a namespace of one's own")
        return 77
    r = Run("full", rows=200, train={"checkpoint_every_steps": 4, "keep_checkpoints": 2, "max_steps": 4})
    try:
        r.start()
        r.must_end(0, "completed")
        whole = files(os.path.join(r.dir, "latest"))
        size = pages(os.path.join(r.dir, "latest")) * 4096 * 3 // 2
        shutil.rmtree(r.dir)
        r.data["train"]["max_steps"] = 0
        r.save()
        saved = os.path.join(r.tmp, "saved")
        with open(r.out, "w", encoding="utf-8") as out:
            r.proc = subprocess.Popen(["unshare", "-rm", "sh", "-c", MOUNT, "sh", r.dir, str(size), e2e.MILLRACE, r.topo, saved], stdout=out, stderr=out,
                                      stdin=subprocess.DEVNULL, start_new_session=True)
        r.must_end(1, "failed")
        text = r.text()
        for words in ("checkpoint 8 was not made", ".tmp: cannot write", "No space left on device: make room on that file system"):
            need(words in text, f"lacks \"{words}\": {text}")
        need(os.readlink(os.path.join(r.dir, "latest")) == "checkpoints/step-4", "latest")
        names = [n for n in os.listdir(saved) if ".tmp-" not in n]
        need(names == ["step-4"], f"checkpoints: {os.listdir(saved)}")
        step4 = os.path.join(saved, "step-4")
        need(sorted(os.listdir(step4)) == sorted(FILES) and len(files(step4)["trainer.safetensors"]) == len(whole["trainer.safetensors"]), "step-4")
    finally:
        r.close()
    return 0


def case_no_uring():
    """Where io_uring is refused, pwrite makes the same files, byte by byte."""
    got = []
    for tag in ("uring", "plain"):
        r = All(tag, max_steps=6)
        try:
            lib, src, env = os.path.join(r.tmp, "no.so"), os.path.join(r.tmp, "no.c"), {}
            if tag == "plain":
                with open(src, "w", encoding="utf-8") as f:
                    f.write("#include <errno.h>\nint io_uring_queue_init() { return -EPERM; }\n")
                if subprocess.run(["cc", "-shared", "-fPIC", "-o", lib, src], check=False).returncode:
                    print("skipped: no C compiler")
                    return 77
                env = {"LD_PRELOAD": lib}
            r.start(env=env)
            r.must_end(0, "completed")
            need(bool(r.lines("files are written by pwrite", "drafter/0")) == (tag == "plain"), f"{r.lines('io_uring')}")
            need(len(r.lines(r"^checkpoint \d+: [0-9.]+ MiB on disk after", "drafter/0")) == 2, f"{r.lines('checkpoint')}")
            got.append(files(os.path.join(r.dir, "latest")))
        finally:
            r.close()
    for name in FILES[:3]:
        need(got[0][name] == got[1][name], f"{name} differs")
    return 0


CASES = {name[5:]: fn for name, fn in list(globals().items()) if name.startswith("case_")}

if __name__ == "__main__":
    e2e_gpu.CASES = CASES
    sys.exit(e2e_gpu.main(sys.argv))
