#!/usr/bin/env python3
"""Loss and gradients of one training microbatch of a DFlash drafter by PyTorch autograd in fp32, as a golden set for golden_dflash.

usage: torch_dflash_golden.py DIR [--tokens 4096] [--anchors 40] [--hidden 512] [--loss ce|dpace] [--window W] ...      needs PyTorch
Writes DIR/config.json, DIR/meta.json and DIR/golden.safetensors ("ragged" layout, docs/dflash.md 8), then:
    golden_dflash DIR            fp32: activations 1e-5, loss 1e-5, gradients 1e-4
    golden_dflash DIR cuda:0     bf16: loss 5e-3, activations 2e-2, gradients 5e-2 relative rms
Written after docs/dflash.md 1, 3 and 3.7b with dense masks, one sequence at a time, and autograd alone.  Weights, embedding, head and hidden
states are values that bf16 holds exactly: whoever computes in bf16 starts with the same numbers.  Sequences: one without a valid anchor, one
with anchor 0 and a block past its end, prompts, and gaps in the supervised part.
The distance of the same step in fp64 and in bf16 is said as well, and what bf16 costs each gradient is written (yard.*, relative rms).
"""
import argparse
import json
import math
import os
import time

import torch
import torch.nn.functional as F

HEADER = 8


# ---- the definition (docs/dflash.md 1.2 to 1.4, 3.2, 3.5) -------------------------------------------------------------------------------

def rmsnorm(x, w, eps):
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    y = x.to(wide)
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * w


def rope(x, pos, theta):
    """x (rows, heads, D): rotate-half, angles in fp32, cos and sin in the activation's type."""
    d = x.shape[-1]
    inv = theta ** (-torch.arange(0, d, 2, device=x.device, dtype=torch.float32) / d)
    angle = pos.to(torch.float32)[:, None] * inv
    cos, sin = angle.cos().to(x.dtype)[:, None], angle.sin().to(x.dtype)[:, None]
    a, b = x[..., :d // 2], x[..., d // 2:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def visible(c, layer, S, anchors):
    """(N*B, S + N*B): context strictly before the anchor, own block; a sliding layer: a window from the query on, causal in its block."""
    B = c["block_size"]
    a = anchors.repeat_interleave(B)
    block, off = torch.arange(len(a), device=a.device) // B, torch.arange(len(a), device=a.device) % B
    t = torch.arange(S, device=a.device)
    context, own = t[None] < a[:, None], block[:, None] == block[None]
    if c["layer_types"][layer] == "sliding_attention":
        context &= t[None] >= (a + off)[:, None] - (c["sliding_window"] - 1)
        own &= off[None] <= off[:, None]
    return torch.cat((context, own), 1)


def attention(c, p, n, ctx, pos_q, pos_k, see):
    nq, nk, d, eps = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"], c["rms_norm_eps"]
    rows = torch.cat((ctx, n))
    q = rope(rmsnorm((n @ p["self_attn.q_proj.weight"].T).view(-1, nq, d), p["self_attn.q_norm.weight"], eps), pos_q, c["rope_theta"])
    k = rope(rmsnorm((rows @ p["self_attn.k_proj.weight"].T).view(-1, nk, d), p["self_attn.k_norm.weight"], eps), pos_k, c["rope_theta"])
    v = (rows @ p["self_attn.v_proj.weight"].T).view(-1, nk, d)
    k, v = k.repeat_interleave(nq // nk, 1), v.repeat_interleave(nq // nk, 1)
    s = torch.einsum("qhd,khd->hqk", q, k) * d ** -0.5
    wide = torch.float64 if s.dtype == torch.float64 else torch.float32
    w = torch.softmax(s.to(wide).masked_fill(~see[None], -math.inf), -1).to(v.dtype)
    return torch.einsum("hqk,khd->qhd", w, v).reshape(len(n), nq * d) @ p["self_attn.o_proj.weight"].T


def forward(c, param, embed, head, seq):
    """Logits (N*B, V) of one sequence's blocks, and the activations by name."""
    B, eps, act = c["block_size"], c["rms_norm_eps"], {}
    S, anchors = len(seq["input_ids"]), seq["anchors"].long()
    ids = torch.full((len(anchors), B), c["dflash_config"]["mask_token_id"], device=anchors.device)
    ids[:, 0] = seq["input_ids"].long()[anchors]
    pos_q = (anchors[:, None] + torch.arange(B, device=anchors.device)).reshape(-1)
    pos_k = torch.cat((torch.arange(S, device=anchors.device), pos_q))
    ctx = rmsnorm(seq["features"].to(embed.dtype) @ param["fc.weight"].T, param["hidden_norm.weight"], eps)
    x = embed[ids.reshape(-1)]
    for i in range(c["num_hidden_layers"]):
        p = {k[len(f"layers.{i}."):]: v for k, v in param.items() if k.startswith(f"layers.{i}.")}
        o = attention(c, p, rmsnorm(x, p["input_layernorm.weight"], eps), ctx, pos_q, pos_k, visible(c, i, S, anchors))
        x = x + o
        m = rmsnorm(x, p["post_attention_layernorm.weight"], eps)
        m = (F.silu(m @ p["mlp.gate_proj.weight"].T) * (m @ p["mlp.up_proj.weight"].T)) @ p["mlp.down_proj.weight"].T
        x = x + m
        act.update({f"layer{i}.attn": o, f"layer{i}.mlp": m, f"layer{i}": x})
    act["hidden"] = rmsnorm(x, param["norm.weight"], eps)
    act["logits"] = act["hidden"] @ head.T
    return act


def weights(c, seq, gamma):
    """Labels (N, B), and which of the slots count (N, B), and their decay (B)."""
    S, B = len(seq["input_ids"]), c["block_size"]
    k = torch.arange(B, device=seq["anchors"].device)
    at = seq["anchors"].long()[:, None] + k
    inside = at < S
    at = at.clamp(max=S - 1)
    m = inside & (k > 0)[None] & (seq["loss_mask"][at] > 0)
    decay = torch.exp(-(k - 1).clamp(min=0).double() / gamma) if gamma > 0 else torch.ones(B, device=k.device, dtype=torch.float64)
    return seq["input_ids"].long()[at], m, decay


def numerator(c, seq, logits, gamma, loss):
    """Sum of weighted cross entropies, and for CE the sum of the weights."""
    label, m, decay = weights(c, seq, gamma)
    z = logits if logits.dtype == torch.float64 else logits.float()
    ce = (torch.logsumexp(z, -1) - z.gather(1, label.reshape(-1, 1))[:, 0]).view(label.shape)
    m = m.to(ce.dtype)
    w = m * decay.to(ce.dtype)
    if loss == "dpace":
        s = torch.where(m > 0, 0.5 * torch.exp(-ce.detach()) + 0.5, torch.ones_like(ce))
        w = m * (torch.cumprod(s, 1) * m).flip(1).cumsum(1).flip(1)
    return (ce * w).sum(), w.sum()


def step(c, param, embed, head, seqs, gamma, loss, dtype):
    """All in `dtype`: gradients of the mean loss by name, numerator, denominator, and what each sequence's forward made."""
    param = {k: v.detach().clone().to(dtype).requires_grad_() for k, v in param.items()}
    embed, head = embed.to(dtype), head.to(dtype)
    den = sum(float((m * decay).sum()) for _, m, decay in (weights(c, s, gamma) for s in seqs)) if loss == "ce" else float(len(seqs))
    num, acts = 0.0, []
    for s in seqs:
        act = forward(c, param, embed, head, s)
        part, _ = numerator(c, s, act["logits"], gamma, loss)
        if len(s["anchors"]):
            (part / den).backward()
        num += float(part.detach())
        acts.append({k: v.detach() for k, v in act.items()})
    return {k: v.grad for k, v in param.items()}, num, den, acts


# ---- the case ---------------------------------------------------------------------------------------------------------------------------

def config(a):
    L = a.layers
    sliding = a.window > 0
    kinds = ["sliding_attention"] * (L - 1) + ["full_attention"] if sliding else ["full_attention"] * L
    return {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": a.hidden, "intermediate_size": 3 * a.hidden,
            "num_attention_heads": a.heads, "num_key_value_heads": a.kv_heads, "head_dim": a.head_dim, "num_hidden_layers": L,
            "num_target_layers": 12, "vocab_size": a.vocab, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 40960,
            "hidden_act": "silu", "attention_bias": False, "block_size": a.block, "initializer_range": 0.02, "tie_word_embeddings": False,
            "layer_types": kinds, "sliding_window": a.window if sliding else None, "use_sliding_window": sliding,
            "dflash_config": {"mask_token_id": a.vocab - 1, "target_layer_ids": [1, 5, 9]}}


def bf16_values(x):
    return x.to(torch.bfloat16).float()


def make_params(c, g):
    """Matrices that keep activations near 1 (deviation fan_in^-0.5), norm weights around 1: attention and SiLU are far from linear."""
    H, q, kv, I = c["hidden_size"], c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"], c["intermediate_size"]
    shapes = {"fc.weight": (H, 3 * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for i in range(c["num_hidden_layers"]):
        at = f"layers.{i}."
        shapes.update({at + "input_layernorm.weight": (H,), at + "post_attention_layernorm.weight": (H,), at + "self_attn.q_proj.weight": (q, H),
                       at + "self_attn.k_proj.weight": (kv, H), at + "self_attn.v_proj.weight": (kv, H), at + "self_attn.o_proj.weight": (H, q),
                       at + "self_attn.q_norm.weight": (c["head_dim"],), at + "self_attn.k_norm.weight": (c["head_dim"],),
                       at + "mlp.gate_proj.weight": (I, H), at + "mlp.up_proj.weight": (I, H), at + "mlp.down_proj.weight": (H, I)})
    out = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=g)
        out[name] = bf16_values(1 + 0.2 * x if len(shape) == 1 else x * shape[1] ** -0.5)
    return out


def lengths(tokens):
    """9 tokens without an anchor, a short one, and three of growing length: together `tokens`."""
    short = min(61, tokens // 8)
    left = tokens - 9 - short
    return [9, short, left // 6, left // 3, left - left // 6 - left // 3]


def make_sequence(c, a, n, number, g):
    ids = torch.randint(0, c["vocab_size"] - 1, (n,), generator=g)
    mask = torch.ones(n, dtype=torch.uint8)
    if number == 0:
        mask.zero_()
    elif number > 1:
        mask[: n // 5] = 0                                            # a prompt
        mask[torch.rand(n, generator=g) < 0.06] = 0
    valid = torch.nonzero((mask[:-1] > 0) & (mask[1:] > 0))[:, 0]
    pick = valid[torch.randperm(len(valid), generator=g)[: a.anchors]]
    if number == 1:                                                   # no context at all, and a block that ends past the sequence
        pick = torch.unique(torch.cat((pick, torch.tensor([0, n - 2]))))
    features = bf16_values(torch.randn(n, 3 * c["hidden_size"], generator=g) * torch.tensor([0.5, 1.0, 3.0]).repeat_interleave(c["hidden_size"]))
    return {"input_ids": ids.int(), "loss_mask": mask, "anchors": pick.sort().values.int(), "features": features}


# ---- files ------------------------------------------------------------------------------------------------------------------------------

NAMES = {torch.float32: "F32", torch.int32: "I32", torch.uint8: "U8"}


def save(path, tensors):
    """safetensors: larger elements first, so that all are aligned."""
    order = sorted(tensors, key=lambda k: (-tensors[k].element_size(), k))
    header, at = {}, 0
    for k in order:
        n = tensors[k].numel() * tensors[k].element_size()
        header[k] = {"dtype": NAMES[tensors[k].dtype], "shape": list(tensors[k].shape), "data_offsets": [at, at + n]}
        at += n
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % HEADER)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for k in order:
            tensors[k].detach().cpu().contiguous().numpy().tofile(f)


def rel_rms(x, ref):
    return float((x.double() - ref.double()).norm() / (ref.double().norm() + 1e-30))


def distance(what, grads, num, ref, ref_num):
    each = {k: rel_rms(grads[k], ref[k]) for k in ref}
    total = math.sqrt(sum(float((grads[k].double() - ref[k].double()).square().sum()) for k in ref) /
                      sum(float(ref[k].double().square().sum()) for k in ref))
    worst = max(each, key=each.get)
    print(f"{what}: loss {abs(num / ref_num - 1):.1e} relative, gradients {total:.1e} (all as one vector), worst {each[worst]:.1e} ({worst})", flush=True)
    return each


def arguments():
    p = argparse.ArgumentParser()
    p.add_argument("dir")
    for name, default in (("layers", 3), ("hidden", 512), ("heads", 8), ("kv-heads", 2), ("head-dim", 128), ("vocab", 4096), ("block", 16),
                          ("tokens", 4096), ("anchors", 40), ("window", 0), ("seed", 1)):
        p.add_argument("--" + name, type=int, default=default)
    p.add_argument("--gamma", type=float, default=7.0)
    p.add_argument("--loss", choices=("ce", "dpace"), default="ce")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return p.parse_args()


def main():
    a = arguments()
    begin = time.time()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    g = torch.Generator().manual_seed(a.seed)
    c = config(a)
    param = {k: v.to(a.device) for k, v in make_params(c, g).items()}
    embed = bf16_values(torch.randn(a.vocab, a.hidden, generator=g)).to(a.device)
    head = bf16_values(torch.randn(a.vocab, a.hidden, generator=g) * 2 * a.hidden ** -0.5).to(a.device)
    seqs = [{k: v.to(a.device) for k, v in make_sequence(c, a, n, i, g).items()} for i, n in enumerate(lengths(a.tokens))]
    print(f"torch {torch.__version__} on {a.device}: {len(seqs)} sequences, {sum(len(s['input_ids']) for s in seqs)} tokens, "
          f"{sum(len(s['anchors']) for s in seqs)} blocks of {a.block}, {sum(x.numel() for x in param.values()) * 1e-6:.1f} M parameters, {a.loss}", flush=True)

    grads, num, den, acts = step(c, param, embed, head, seqs, a.gamma, a.loss, torch.float32)
    print(f"fp32: loss {num / den:.6f} = {num:.6f} / {den:.6f}, {time.time() - begin:.1f} s", flush=True)
    low, low_num, _, _ = step(c, param, embed, head, seqs, a.gamma, a.loss, torch.bfloat16)
    yard = distance("bf16 autograd against it", low, low_num, grads, num)
    high, high_num, _, _ = step(c, param, embed, head, seqs, a.gamma, a.loss, torch.float64)
    distance("it against fp64 autograd", grads, num, high, high_num)

    out = {"embed": embed, "head": head}
    scalars = {"loss": num / den, "loss_sum": num, "weight_sum": den, **{"yard." + k: v for k, v in yard.items()}}
    out.update({k: torch.tensor([v], dtype=torch.float32) for k, v in scalars.items()})
    out.update({"param." + k: v for k, v in param.items()})
    out.update({"grad." + k: v for k, v in grads.items()})
    for i, (s, act) in enumerate(zip(seqs, acts)):
        out.update({f"s{i}.{k}": v for k, v in {**s, **act}.items()})
    os.makedirs(a.dir, exist_ok=True)
    save(os.path.join(a.dir, "golden.safetensors"), out)
    for name, what in (("config.json", c), ("meta.json", {"gamma": a.gamma, "loss": a.loss})):
        with open(os.path.join(a.dir, name), "w", encoding="utf-8") as f:
            json.dump(what, f)
    size = os.path.getsize(os.path.join(a.dir, "golden.safetensors"))
    print(f"{a.dir}: {len(out)} tensors, {size / 2**20:.0f} MiB, {time.time() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
