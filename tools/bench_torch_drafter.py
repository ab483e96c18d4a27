#!/usr/bin/env python3
"""The step of `millrace-actor bench-drafter` written with PyTorch, for comparison: the same model, shapes and number of labels.

bf16 weights and activations, compiled layers, flex attention with a block mask (context before the anchor, own block), cross entropy over
chunks of rows whose gradient is computed with it, fp32 masters and moments in a fused AdamW, gradient clipping.  Needs torch and a GPU.

usage: bench_torch_drafter.py --config DIR [--layers 5] [--block 16] [--anchors 512] [--tokens 3072] [--runs 9]
"""
import argparse
import json
import os
import time

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

CE_ROWS = 2048


def norm(x, w, eps):
    v = x.float()
    return (v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * w


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Layer(torch.nn.Module):
    def __init__(self, c):
        super().__init__()
        H, self.hd, self.nh, self.kv, self.eps = c["hidden_size"], c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"], c["rms_norm_eps"]
        q, k = self.nh * self.hd, self.kv * self.hd

        def p(*shape):
            return torch.nn.Parameter(torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * 0.02 if len(shape) > 1
                                      else torch.ones(*shape, device="cuda", dtype=torch.bfloat16))

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
        o = flex_attention(q, k, v.transpose(0, 1)[None].contiguous(), block_mask=mask, enable_gqa=True)
        x = x + F.linear(o[0].transpose(0, 1).reshape(x.shape[0], -1), self.o)
        g, u = F.linear(norm(x, self.ln2, self.eps), self.gu).chunk(2, -1)
        return x + F.linear(F.silu(g) * u, self.down)


@torch.compile
def ce_rows(z, label, weight):
    z = z.float()
    lse = torch.logsumexp(z, -1)
    loss = ((lse - z.gather(1, label[:, None])[:, 0]) * weight).sum()
    g = torch.exp(z - lse[:, None])
    hot = torch.arange(z.shape[1], device=z.device)[None] == label[:, None]
    return loss, ((g - hot.float()) * weight[:, None]).bfloat16()


class ChunkedCE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, head, label, weight):
        dx, loss = torch.empty_like(x), torch.zeros((), device=x.device)
        for i in range(0, x.shape[0], CE_ROWS):
            part, g = ce_rows(x[i:i + CE_ROWS] @ head.t(), label[i:i + CE_ROWS], weight[i:i + CE_ROWS])
            torch.mm(g, head, out=dx[i:i + CE_ROWS])
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
        self.fc = torch.nn.Parameter(torch.randn(H, features, device="cuda", dtype=torch.bfloat16) * 0.02)
        self.hidden_norm = torch.nn.Parameter(torch.ones(H, device="cuda", dtype=torch.bfloat16))
        self.norm = torch.nn.Parameter(torch.ones(H, device="cuda", dtype=torch.bfloat16))
        self.layers = torch.nn.ModuleList(Layer(c) for _ in range(layers))

    def forward(self, x, features, tables, mask):
        ctx = norm(F.linear(features, self.fc), self.hidden_norm, self.eps)
        for layer in self.layers:
            x = layer(x, ctx, *tables, mask)
        return norm(x, self.norm, self.eps)


def tables(c, pos):
    inv = c.get("rope_theta", 1e6) ** (-torch.arange(0, c["head_dim"], 2, device="cuda").float() / c["head_dim"])
    a = (pos[:, None].float() * inv[None]).repeat(1, 2)[:, None]
    return a.cos().bfloat16(), a.sin().bfloat16()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--config", required=True)
    for name, default in (("layers", 5), ("block", 16), ("anchors", 512), ("tokens", 3072), ("runs", 9)):
        p.add_argument("--" + name, type=int, default=default)
    a = p.parse_args()
    with open(os.path.join(a.config, "config.json"), encoding="utf-8") as f:
        c = json.load(f)
    torch.manual_seed(1)
    H, V, B, S, N, K = c["hidden_size"], c["vocab_size"], a.block, a.tokens, a.anchors, 5
    R = N * B
    model = Drafter(c, a.layers, K * H)
    embed = torch.randn(V, H, device="cuda", dtype=torch.bfloat16) * 0.02
    head = torch.randn(V, H, device="cuda", dtype=torch.bfloat16) * 0.02
    features = torch.randn(S, K * H, device="cuda", dtype=torch.bfloat16)
    anchor = torch.randperm(S - B, device="cuda")[:N].sort().values
    ids = torch.randint(V, (S,), device="cuda")
    pos = (anchor[:, None] + torch.arange(B, device="cuda")).reshape(-1)
    block_ids = torch.full((N, B), V - 1, device="cuda")
    block_ids[:, 0] = ids[anchor]
    pick = torch.arange(R, device="cuda").view(N, B)[:, 1:].reshape(-1)
    label = ids[pos[pick]]
    weight = torch.exp(-(torch.arange(B - 1, device="cuda").float()) / 7).repeat(N)
    weight = weight / weight.sum()
    t = (*tables(c, pos), *tables(c, torch.cat((torch.arange(S, device="cuda"), pos))))

    def visible(b, h, q, k):
        return torch.where(k < S, k < anchor[q // B], (k - S) // B == q // B)

    mask = create_block_mask(visible, None, None, R, S + R, device="cuda")
    forward = torch.compile(model, dynamic=False)
    params = list(model.parameters())
    masters = [torch.nn.Parameter(x.detach().float()) for x in params]
    opt = torch.optim.AdamW(masters, lr=6e-4, weight_decay=0.0, fused=True)

    def step():
        x = F.embedding(block_ids.view(-1), embed)
        out = forward(x, features, t, mask)
        loss = ChunkedCE.apply(out[pick], head, label, weight)
        loss.backward()
        for m, x in zip(masters, params):
            m.grad = x.grad.float()
            x.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0, foreach=True)
        opt.step()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)
        opt.zero_grad()
        return loss

    begin = time.time()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    warm = time.time() - begin
    torch.cuda.reset_peak_memory_stats()
    ms = []
    for _ in range(a.runs):
        at = time.time()
        step()
        torch.cuda.synchronize()
        ms.append((time.time() - at) * 1e3)
    ms.sort()
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    flop = (a.layers * 6 * R * (H * (2 * q + 2 * kv) + 3 * H * c["intermediate_size"]) + 4 * S * H * K * H + a.layers * 6 * S * H * 2 * kv +
            a.layers * 3.5 * 4 * R * (S / 2 + B) * q + 4 * N * (B - 1) * H * V)
    mid = ms[len(ms) // 2]
    print(f"torch {torch.__version__}: step {mid:.2f} ms (fastest {ms[0]:.2f}), {flop * 1e-12:.1f} TFLOP, {flop / mid * 1e-9:.1f} TFLOP/s, "
          f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB allocated, {torch.cuda.max_memory_reserved() / 2**30:.1f} reserved, "
          f"compiled in {warm:.0f} s")


if __name__ == "__main__":
    main()
