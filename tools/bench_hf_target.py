#!/usr/bin/env python3
"""The same forward pass in PyTorch: Hugging Face transformers, random bf16 weights of a config, sdpa attention, eager and torch.compile.

usage: bench_hf_target.py CONFIG_DIR [--layers N] [--capture 1,9,17,25,33] [--tokens 16384] [--length 2048] [--limit 150]
                          [--compile layers,whole | --no-compile] [--only eager|compiled] [--cudnn] [--device cuda] [--runs 10] [--seconds 3]
                          [--rounds 5] [--rest 0.5] [--json]
N is the number of decoder layers that run (the highest captured one + 1).  What is done is what `millrace-bench target` does: embedding, N
layers, no head, and the outputs of the captured layers in one tensor (tokens, K * H).  A model of N layers also norms its last output, which is
0.1 % of the work.  Times are taken as there (torch_times.py): sustained, and short after a rest; lines are printed as they are measured.
--compile: layers: one decoder layer is compiled, and its code is that of all; whole: the model at once, begun only while there is time for it.
The reference is the faster of those that were measured.  --limit: seconds from the start; then it ends with what has been measured, even in
the middle of a compilation.  --only compiled: no eager pass.  --cudnn: a further line with cuDNN's attention.
Needs torch and transformers; --device cpu is for trying it out.
"""
import argparse
import inspect
import json
import os
import signal
import sys
import time

import torch
import torch_times
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

BEGIN = time.perf_counter()


def arguments():
    p = argparse.ArgumentParser()
    p.add_argument("config")
    p.add_argument("--layers", type=int)
    p.add_argument("--capture")
    p.add_argument("--tokens", type=int, default=16384)
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--limit", type=float, default=150.0)
    p.add_argument("--device", default="cuda")
    p.add_argument("--compile", default="layers,whole")
    p.add_argument("--no-compile", dest="compile", action="store_const", const="")
    p.add_argument("--only", choices=("eager", "compiled"))
    p.add_argument("--cudnn", action="store_true")
    p.add_argument("--json", action="store_true")
    torch_times.add_arguments(p)
    a = p.parse_args()
    if a.only == "eager":
        a.compile = ""
    if unknown := set(filter(None, a.compile.split(","))) - {"layers", "whole"}:
        p.error(f"--compile {','.join(unknown)}: layers and whole are known")
    return a


def default_layers(depth):
    """As pick_layers of actors/bench_target.c, of those that run."""
    return [round(1 + i * (depth - 2) / 4) for i in range(5)] if depth >= 6 else [depth - 1]


class Bench:
    def __init__(self, a):
        config = transformers.AutoConfig.from_pretrained(a.config)
        if a.layers:
            config.num_hidden_layers = a.layers
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[: a.layers]
        config._attn_implementation = "sdpa"
        self.a = a
        self.layers = [int(x) for x in a.capture.split(",")] if a.capture else default_layers(config.num_hidden_layers)
        if max(self.layers) >= config.num_hidden_layers:
            sys.exit(f"--capture {self.layers}: only {config.num_hidden_layers} layers run")
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(a.device):
            self.model = transformers.AutoModel.from_config(config).eval()
            self.ids = torch.randint(0, config.vocab_size, (a.tokens // a.length, a.length))
        self.n = self.ids.numel()
        self.out = {"torch": torch.__version__, "transformers": transformers.__version__, "layers": config.num_hidden_layers,
                    "dtype": str(next(self.model.parameters()).dtype), "tokens": self.n, "length": a.length}

    def left(self):
        return self.a.limit - (time.perf_counter() - BEGIN)

    @torch.inference_mode()
    def forward(self, model):
        states = model(input_ids=self.ids, use_cache=False, output_hidden_states=True).hidden_states
        return torch.cat([states[i + 1] for i in self.layers], -1)

    def measure(self, name, model):
        t = torch_times.measure(lambda: self.forward(model), self.a)
        for way in ("sustained", "short", "queued"):
            self.out[f"{name}_{way}_tokens_per_s"] = self.n / t[way]
        if not self.a.json:
            print(f"{name:10s} sustained {t['sustained'] * 1e3:8.2f} ms {self.n / t['sustained']:9,.0f} tokens_per_s ({t['runs']} forwards)   "
                  f"short {t['short'] * 1e3:8.2f} ms {self.n / t['short']:9,.0f} tokens_per_s   one wait for {self.a.runs}: "
                  f"{t['queued'] * 1e3:8.2f} ms", flush=True)

    @torch.inference_mode()
    def layers_compiled(self, fullgraph):
        """Only forward(): the hook that collects a layer's output stays outside.  Hooks inside, for attention weights, which nobody asks for, and
        wrappers that rename arguments go, so that the graph is whole."""
        self.model(input_ids=self.ids[:1, :8], use_cache=False, output_hidden_states=True)         # puts the hooks there
        for layer in self.model.layers:
            for m in layer.modules():
                m.forward = inspect.unwrap(type(m).forward).__get__(m)
                if m is not layer:
                    m._forward_hooks.clear()
            layer.forward = torch.compile(layer.forward, dynamic=False, fullgraph=fullgraph)
        return self.model

    def whole_compiled(self):
        for m in self.model.layers.modules():
            m.__dict__.pop("forward", None)
        return torch.compile(self.model, dynamic=False)

    def compiled(self, how):
        at = time.perf_counter()
        model = self.layers_compiled(True) if how == "layers" else self.whole_compiled()
        try:
            self.forward(model)
        except torch._dynamo.exc.Unsupported as e:
            if how == "whole":
                raise
            print(f"layers: not one graph ({' '.join(str(e).split())[:300]})", file=sys.stderr, flush=True)
            model = self.layers_compiled(False)
            self.forward(model)
        torch_times.wait()
        self.out[f"{how}_compile_s"] = took = time.perf_counter() - at
        if not self.a.json:
            print(f"{how}: compiled in {took:.0f} s", flush=True)
        self.measure(how, model)
        return took

    def compilations(self):
        took = 0.0
        for how in filter(None, self.a.compile.split(",")):
            if self.left() < max(20 if how == "layers" else 45, took):
                print(f"{how}: left out, {self.left():.0f} s are left", file=sys.stderr, flush=True)
                continue
            try:
                took = self.compiled(how)
            except Exception as e:                                     # the other one counts
                print(f"{how}: {type(e).__name__}: {str(e)[:300]}", file=sys.stderr, flush=True)

    def finish(self):
        best = {how: self.out[f"{how}_sustained_tokens_per_s"] for how in ("layers", "whole") if f"{how}_queued_tokens_per_s" in self.out}
        if best:
            how = max(best, key=best.get)
            for way in ("sustained", "short", "queued"):
                self.out[f"compiled_{way}_tokens_per_s"] = self.out[f"{how}_{way}_tokens_per_s"]
            if not self.a.json:
                print(f"torch.compile ({how}): {best[how]:,.0f} tokens_per_s sustained, {self.out['compiled_short_tokens_per_s']:,.0f} short", flush=True)
        if self.a.json:
            print(json.dumps(self.out), flush=True)

    def end_at_limit(self):
        """A handler runs between two steps of the interpreter, so a compilation is interrupted; its helpers end with their pipe."""

        def end(*_):
            print(f"the limit of {self.a.limit:.0f} s is over", file=sys.stderr, flush=True)
            self.finish()
            os._exit(0)

        signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, max(self.left(), 0.1))


def main():
    a = arguments()
    b = Bench(a)
    if not a.json:
        print(", ".join(f"{k} {v}" for k, v in b.out.items()) + f", captured {b.layers}, ready after {a.limit - b.left():.0f} s", flush=True)
    b.end_at_limit()
    if a.only != "compiled":
        b.measure("eager", b.model)
    if a.cudnn and b.left() > 20:
        try:
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
                b.measure("cudnn", b.model)
        except Exception as e:                                         # a build without it: the other lines count
            print(f"cuDNN attention: {type(e).__name__}: {str(e)[:100]}", flush=True)
    b.compilations()
    signal.setitimer(signal.ITIMER_REAL, 0)
    b.finish()


if __name__ == "__main__":
    main()
