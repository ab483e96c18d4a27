"""What the final checkpoint of a synthetic run must hold, from its ledger alone (the arithmetic of actors/synthetic.c).

The second moment of the first tensor starts at zero and only ever adds the reduced gradient: one small integer per applied sample, at an
index that depends on the sample.  So it says exactly which samples were applied and how often.
"""
import json
import os
import struct

MASK = (1 << 64) - 1


def mix64(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def tensor(path, name):
    """A f32 tensor of a safetensors file, as a tuple."""
    with open(path, "rb") as f:
        size = struct.unpack("<Q", f.read(8))[0]
        entry = json.loads(f.read(size))[name]
        begin, end = entry["data_offsets"]
        f.seek(8 + size + begin)
        return struct.unpack(f"<{(end - begin) // 4}f", f.read(end - begin))


def weights_violation(rundir):
    """None, or a sentence: the final checkpoint does not hold each sample of the ledger exactly once."""
    with open(os.path.join(rundir, "ledger.jsonl"), encoding="utf-8") as f:
        lines = [json.loads(line) for line in f]
    trainer = os.path.join(rundir, "latest", "trainer.safetensors")
    got = tensor(trainer, "fc.weight.exp_avg_sq")
    want = [0] * len(got)
    for line in lines:
        for item in line["items"]:
            for sample in item["samples"]:
                h = mix64(sample)
                want[h % len(want)] += 1 + mix64(h ^ line["epoch"]) % 7
    wrong = [i for i, (g, w) in enumerate(zip(got, want)) if g != w]
    if wrong:
        i = wrong[0]
        return f"weights: {len(wrong)} of {len(want)} differ from the ledger's samples; first at {i}: {got[i]}, expected {want[i]}"
    steps = tensor(trainer, "fc.weight.exp_avg")[0]
    if steps != len(lines):
        return f"weights: {steps:.0f} optimizer steps were applied, the ledger has {len(lines)}"
    return None
