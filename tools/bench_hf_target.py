#!/usr/bin/env python3
"""The same forward pass in PyTorch: Hugging Face transformers, random bf16 weights of a config, sdpa attention, eager and torch.compile.

usage: bench_hf_target.py CONFIG_DIR [--layers N] [--tokens 16384] [--length 2048] [--runs 5] [--no-compile] [--json]
N is the number of decoder layers that run (the highest captured one + 1); the hidden states of all of them are asked for, as a capture would.
Needs a GPU, torch and transformers.
"""
import argparse
import json
import statistics
import time

import torch
import transformers


def timed(fn, runs):
    fn()
    fn()
    times = []
    for _ in range(runs):
        torch.cuda.synchronize()
        t0 = time.perf_counter()
        fn()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - t0)
    return statistics.median(times)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("config")
    p.add_argument("--layers", type=int)
    p.add_argument("--tokens", type=int, default=16384)
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--runs", type=int, default=5)
    p.add_argument("--no-compile", action="store_true")
    p.add_argument("--json", action="store_true")
    a = p.parse_args()

    config = transformers.AutoConfig.from_pretrained(a.config)
    if a.layers:
        config.num_hidden_layers = a.layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: a.layers]
    config._attn_implementation = "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.AutoModel.from_config(config).eval()
        ids = torch.randint(0, config.vocab_size, (a.tokens // a.length, a.length))
    n = ids.numel()
    out = {"torch": torch.__version__, "transformers": transformers.__version__, "layers": config.num_hidden_layers, "tokens": n, "length": a.length}

    @torch.inference_mode()
    def forward(m):
        return m(input_ids=ids, use_cache=False, output_hidden_states=True)

    out["eager_tokens_per_s"] = n / timed(lambda: forward(model), a.runs)
    if not a.no_compile:
        t0 = time.perf_counter()
        compiled = torch.compile(model)
        forward(compiled)
        torch.cuda.synchronize()
        out["compile_s"] = time.perf_counter() - t0
        out["compiled_tokens_per_s"] = n / timed(lambda: forward(compiled), a.runs)
    if a.json:
        print(json.dumps(out))
    else:
        for k, v in out.items():
            print(f"{k:24s} {v:,.1f}" if isinstance(v, float) else f"{k:24s} {v}")


if __name__ == "__main__":
    main()
