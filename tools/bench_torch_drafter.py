#!/usr/bin/env python3
"""The step of `millrace-actor bench-drafter` written with PyTorch, for comparison: the same model, shapes and number of labels.

bf16 weights and activations, flex attention with a block mask (context before the anchor, own block), cross entropy over chunks of rows whose
gradient is computed with it, fp32 masters and moments in a fused AdamW, gradient clipping.  --compile says what is compiled, one after the other:
  attention   flex attention and the cross entropy, all else eager: the usual form, and the one that others are compared with
  layers      each layer as a whole, too (one compilation for all)
Operations are counted, and times taken, as bench-drafter does (torch_times.py): sustained, and short after a rest; lines are printed as they
are measured, and once more at the end.

usage: bench_torch_drafter.py --config DIR [--layers 5] [--block 16] [--anchors 512] [--tokens 3072] [--limit 140] [--compile attention,layers]
                              [--device cuda] [--runs 10] [--seconds 3] [--rounds 5] [--rest 0.5]
--limit: seconds from the start after which no further compilation is begun.  Needs torch and a GPU.  --device cpu, with a dense mask and, unless
--compile is given, nothing compiled, is for trying it out; --check there compares the loss and gradients of this step with those of plain
autograd.
"""
import argparse
import json
import math
import os
import time

import torch
import torch.nn.functional as F
import torch_times
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

BEGIN = time.perf_counter()
CE_ROWS = 2048
DEVICE = "cuda"


def norm(x, w, eps):
    v = x.float()
    return (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * w


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def attention(q, k, v, mask):
    if isinstance(mask, torch.Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


attend = attention                                                     # or the compiled one


class Layer(torch.nn.Module):
    def __init__(self, c):
        super().__init__()
        H, self.hd, self.nh, self.kv, self.eps = c["hidden_size"], c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"], c["rms_norm_eps"]
        q, k = self.nh * self.hd, self.kv * self.hd

        def p(*shape):
            return torch.nn.Parameter(torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16) * 0.02 if len(shape) > 1
                                      else torch.ones(*shape, device=DEVICE, dtype=torch.bfloat16))

        self.ln1, self.ln2, self.qn, self.kn = p(H), p(H), p(self.hd), p(self.hd)
        self.q, self.kvw, self.o = p(q, H), p(2 * k, H), p(H, q)
        self.gu, self.down = p(2 * c["intermediate_size"], H), p(H, c["intermediate_size"])

    def forward(self, x, ctx, cos_q, sin_q, cos_k, sin_k, mask):
        n = norm(x, self.ln1, self.eps)
        q = F.linear(n, self.q).view(-1, self.nh, self.hd)
        kv = torch.cat((F.linear(ctx, self.kvw), F.linear(n, self.kvw)))
        k, v = kv.view(-1, 2, self.kv, self.hd).unbind(1)
        q = rotate(norm(q, self.qn, self.eps), cos_q, sin_q).transpose(0, 1)[None]
        k = rotate(norm(k, self.kn, self.eps), cos_k, sin_k).transpose(0, 1)[None]
        o = attend(q, k, v.transpose(0, 1)[None].contiguous(), mask)
        x = x + F.linear(o[0].transpose(0, 1).reshape(x.shape[0], -1), self.o)
        g, u = F.linear(norm(x, self.ln2, self.eps), self.gu).chunk(2, -1)
        return x + F.linear(F.silu(g) * u, self.down)


def ce_rows(z, label, weight):
    z = z.float()
    lse = torch.logsumexp(z, -1)
    loss = ((lse - z.gather(1, label[:, None])[:, 0]) * weight).sum()
    g = torch.exp(z - lse[:, None])
    hot = torch.arange(z.shape[1], device=z.device)[None] == label[:, None]
    return loss, ((g - hot.float()) * weight[:, None]).bfloat16()


ce_compiled = torch.compile(ce_rows, dynamic=False)


class ChunkedCE(torch.autograd.Function):
    """Rows in chunks of one size, so that one compilation does; the gradient is made in the forward pass, which knows the logits."""

    @staticmethod
    def forward(ctx, x, head, label, weight):
        ce = ce_compiled if x.is_cuda else ce_rows
        dx, loss = torch.empty_like(x), torch.zeros((), device=x.device)
        rows = math.ceil(x.shape[0] / math.ceil(x.shape[0] / CE_ROWS))
        for i in range(0, x.shape[0], rows):
            part, g = ce(x[i:i + rows] @ head.t(), label[i:i + rows], weight[i:i + rows])
            torch.mm(g, head, out=dx[i:i + rows])
            loss += part
        ctx.save_for_backward(dx)
        return loss

    @staticmethod
    def backward(ctx, d):
        return ctx.saved_tensors[0] * d.to(torch.bfloat16), None, None, None


class Drafter(torch.nn.Module):
    def __init__(self, c, layers, features):
        super().__init__()
        H = c["hidden_size"]
        self.eps = c["rms_norm_eps"]
        self.fc = torch.nn.Parameter(torch.randn(H, features, device=DEVICE, dtype=torch.bfloat16) * 0.02)
        self.hidden_norm = torch.nn.Parameter(torch.ones(H, device=DEVICE, dtype=torch.bfloat16))
        self.norm = torch.nn.Parameter(torch.ones(H, device=DEVICE, dtype=torch.bfloat16))
        self.layers = torch.nn.ModuleList(Layer(c) for _ in range(layers))

    def forward(self, x, features, tables, mask):
        ctx = norm(F.linear(features, self.fc), self.hidden_norm, self.eps)
        for layer in self.layers:
            x = layer(x, ctx, *tables, mask)
        return norm(x, self.norm, self.eps)


def tables(c, pos):
    inv = c.get("rope_theta", 1e6) ** (-torch.arange(0, c["head_dim"], 2, device=DEVICE).float() / c["head_dim"])
    a = (pos[:, None].float() * inv[None]).repeat(1, 2)[:, None]
    return a.cos().bfloat16(), a.sin().bfloat16()


class Bench:
    """The data of bench-drafter, and one step over it."""

    def __init__(self, c, a):
        torch.manual_seed(1)
        H, V, B, S, N, K = c["hidden_size"], c["vocab_size"], a.block, a.tokens, a.anchors, 5
        self.c, self.a, self.R = c, a, N * B
        self.model = Drafter(c, a.layers, K * H)
        self.embed = torch.randn(V, H, device=DEVICE, dtype=torch.bfloat16) * 0.02
        self.head = torch.randn(V, H, device=DEVICE, dtype=torch.bfloat16) * 0.02
        self.features = torch.randn(S, K * H, device=DEVICE, dtype=torch.bfloat16)
        self.anchor = torch.randperm(S - B, device=DEVICE)[:N].sort().values
        ids = torch.randint(V, (S,), device=DEVICE)
        pos = (self.anchor[:, None] + torch.arange(B, device=DEVICE)).reshape(-1)
        self.block_ids = torch.full((N, B), V - 1, device=DEVICE)
        self.block_ids[:, 0] = ids[self.anchor]
        self.pick = torch.arange(self.R, device=DEVICE).view(N, B)[:, 1:].reshape(-1)
        self.label = ids[pos[self.pick]]
        weight = torch.exp(-(torch.arange(B - 1, device=DEVICE).float()) / 7).repeat(N)
        self.weight = weight / weight.sum()
        self.tables = (*tables(c, pos), *tables(c, torch.cat((torch.arange(S, device=DEVICE), pos))))
        self.mask = self.make_mask(S, B)
        self.params = list(self.model.parameters())
        self.masters = [torch.nn.Parameter(x.detach().float()) for x in self.params]
        self.opt = torch.optim.AdamW(self.masters, lr=6e-4, weight_decay=0.0, fused=True)

    def make_mask(self, S, B):
        anchor, R = self.anchor, self.R

        def visible(b, h, q, k):
            return torch.where(k < S, k < anchor[q // B], (k - S) // B == q // B)

        if DEVICE == "cpu":
            q, k = torch.arange(R)[:, None], torch.arange(S + R)[None]
            return visible(None, None, q, k)
        mask = create_block_mask(visible, None, None, R, S + R, device=DEVICE)
        torch.cuda.empty_cache()                                       # making it takes more than a step does
        return mask

    def compile(self, how):
        global attend
        attend = torch.compile(attention, dynamic=False) if how == "attention" else attention
        for layer in self.model.layers:
            if how == "layers":
                layer.compile(dynamic=False)
            else:
                layer._compiled_call_impl = None

    def loss(self):
        x = F.embedding(self.block_ids.view(-1), self.embed)
        out = self.model(x, self.features, self.tables, self.mask)
        return ChunkedCE.apply(out[self.pick], self.head, self.label, self.weight)

    def step(self):
        loss = self.loss()
        loss.backward()
        for m, x in zip(self.masters, self.params):
            m.grad = x.grad.float()
            x.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=True)
        self.opt.step()
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.masters)
        self.opt.zero_grad()
        return loss

    def flop(self):
        """As model_tflop of actors/bench_drafter.c."""
        c, a, R, H, S, K = self.c, self.a, self.R, self.c["hidden_size"], self.a.tokens, 5
        q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
        return (a.layers * 6 * R * (H * (2 * q + 2 * kv) + 3 * H * c["intermediate_size"]) + 4 * S * H * K * H + a.layers * 6 * S * H * 2 * kv +
                a.layers * 3.5 * 4 * R * (S / 2 + a.block) * q + 4 * a.anchors * (a.block - 1) * H * c["vocab_size"])


def report(b, how):
    """Prints; one line of it comes again at the end."""
    at = time.perf_counter()
    first = float(b.step())
    torch_times.wait()
    compiled = time.perf_counter() - at
    print(f"torch {torch.__version__}, compiled: {how}, in {compiled:.0f} s", flush=True)
    if DEVICE != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    t = torch_times.measure(b.step, b.a)
    flop, memory = b.flop(), ""
    print(f"  {flop * 1e-12:.1f} TFLOP a step, loss {first:.3f} -> {float(b.step()):.3f}")
    for way, what in (("sustained", f"{t['runs']} steps, fastest {t['fastest'] * 1e3:.2f} ms"),
                      ("short", f"{b.a.rounds} times {b.a.burst} steps after {b.a.rest} s of rest"), ("queued", f"{b.a.runs} steps, one wait")):
        print(f"  torch {way:9s} ({how}): step {t[way] * 1e3:.2f} ms, {flop / t[way] * 1e-12:.1f} TFLOP/s   ({what})")
    if DEVICE != "cpu":
        free, total = torch.cuda.mem_get_info()
        memory = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB allocated"
        print(f"  peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB allocated, {torch.cuda.max_memory_reserved() / 2**30:.1f} reserved, "
              f"{(total - free) / 2**30:.1f} in use on the device")
    print(f"  after {time.perf_counter() - BEGIN:.0f} s", flush=True)
    return f"PyTorch, compiled: {how:9s} " + ", ".join(f"{way} {t[way] * 1e3:.2f} ms = {flop / t[way] * 1e-12:.1f} TFLOP/s"
                                                         for way in ("sustained", "short")) + memory


def check(b):
    """This step's loss and gradients against autograd through the whole of the logits."""
    loss = b.loss()
    loss.backward()
    ours = [x.grad.float() for x in b.params]
    for x in b.params:
        x.grad = None
    out = b.model(F.embedding(b.block_ids.view(-1), b.embed), b.features, b.tables, b.mask)
    ce = F.cross_entropy((out[b.pick] @ b.head.t()).float(), b.label, reduction="none")
    plain = (ce * b.weight).sum()
    plain.backward()
    worst = max(float((g - x.grad.float()).norm() / (x.grad.float().norm() + 1e-30)) for g, x in zip(ours, b.params))
    for x in b.params:
        x.grad = None
    print(f"loss {float(loss):.6f}, plain {float(plain):.6f}; gradients: worst relative difference {worst:.1e}", flush=True)


def main():
    global DEVICE
    p = argparse.ArgumentParser()
    p.add_argument("--config", required=True)
    for name, default in (("layers", 5), ("block", 16), ("anchors", 512), ("tokens", 3072)):
        p.add_argument("--" + name, type=int, default=default)
    p.add_argument("--limit", type=float, default=140.0)
    p.add_argument("--compile", help="attention, layers, none; several with commas (default: attention,layers; on cpu none)")
    p.add_argument("--device", default="cuda")
    p.add_argument("--check", action="store_true")
    torch_times.add_arguments(p)
    a = p.parse_args()
    DEVICE = a.device
    kinds = (a.compile or ("none" if DEVICE == "cpu" else "attention,layers")).split(",")
    if set(kinds) - {"attention", "layers", "none"}:
        p.error(f"--compile {a.compile}: attention, layers and none are known")
    with open(os.path.join(a.config, "config.json"), encoding="utf-8") as f:
        b = Bench(json.load(f), a)
    torch_times.wait()
    print(f"ready after {time.perf_counter() - BEGIN:.0f} s", flush=True)
    if a.check:
        check(b)
    took, lines = 0.0, []
    for how in kinds:
        at = time.perf_counter()
        if took * 2 > a.limit - (at - BEGIN):
            print(f"{how}: left out, no time", flush=True)
            continue
        b.compile(how)
        lines.append(report(b, how))
        took = time.perf_counter() - at
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
