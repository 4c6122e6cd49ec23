"""The decoder written a second time, in plain float64 loops that share nothing with the library.

It reads weights by the names of the state dict and follows the course's formulas literally.
"""

import math

import torch


def rms_norm(x, gain, eps):
    return [
        xi / math.sqrt(sum(v * v for v in x) / len(x) + eps) * g
        for xi, g in zip(x, gain, strict=True)
    ]


def times(weight, x):
    return [sum(w * v for w, v in zip(row, x, strict=True)) for row in weight]


def softmax(scores):
    powers = [math.exp(s - max(scores)) for s in scores]
    return [p / sum(powers) for p in powers]


def rotate(x, position, theta):
    half = len(x) // 2
    out = list(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def swiglu(w, name, x):
    gate, up = times(w[f"{name}.w_gate.weight"], x), times(w[f"{name}.w_up.weight"], x)
    return times(
        w[f"{name}.w_down.weight"],
        [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)],
    )


def add(*vectors):
    return [sum(parts) for parts in zip(*vectors, strict=True)]


def heads(vector, width):
    return [vector[i : i + width] for i in range(0, len(vector), width)]


def attention(w, name, stream, cfg):
    queries, keys, values = [], [], []
    for position, x in enumerate(stream):
        q, k, v = (heads(times(w[f"{name}.W_{n}.weight"], x), cfg.d_head) for n in "qkv")
        gain_q, gain_k = w[f"{name}.q_norm.weight"], w[f"{name}.k_norm.weight"]
        turn = [(head, gain_q) for head in q], [(head, gain_k) for head in k]
        q, k = (
            [rotate(rms_norm(h, g, cfg.norm_eps), position, cfg.rope_theta) for h, g in side]
            for side in turn
        )
        queries.append(q), keys.append(k), values.append(v)
    out = []
    for t in range(len(stream)):
        row = []
        for h in range(cfg.n_heads):
            shared = h // (cfg.n_heads // cfg.n_kv_heads)
            seen = range(t + 1)
            dots = [
                sum(a * b for a, b in zip(queries[t][h], keys[s][shared], strict=True))
                for s in seen
            ]
            weights = softmax([dot / math.sqrt(cfg.d_head) for dot in dots])
            row += [sum(weights[s] * values[s][shared][c] for s in seen) for c in range(cfg.d_head)]
        out.append(times(w[f"{name}.W_o.weight"], row))
    return out


def experts(w, name, x, cfg):
    logits = times(w[f"{name}.gate.weight"], x)
    best = sorted(range(len(logits)), key=lambda e: -logits[e])[: cfg.n_experts_active]
    shares = softmax([logits[e] for e in best])
    routed = [
        [share * v for v in swiglu(w, f"{name}.experts.{e}", x)]
        for e, share in zip(best, shares, strict=True)
    ]
    always = [swiglu(w, f"{name}.shared.{i}", x) for i in range(cfg.n_shared_experts)]
    return add(*routed, *always)


def logits(state_dict, cfg, ids) -> torch.Tensor:
    """Logits (T, V) of one row of token ids, float64."""
    w = {name: tensor.double().tolist() for name, tensor in state_dict.items()}
    stream = [w["embed.weight"][i] for i in ids]
    for layer in range(cfg.n_layers):
        block = f"blocks.{layer}"
        normed = [rms_norm(x, w[f"{block}.norm1.weight"], cfg.norm_eps) for x in stream]
        mixed = attention(w, f"{block}.attn", normed, cfg)
        stream = [add(x, y) for x, y in zip(stream, mixed, strict=True)]
        dense = layer < cfg.first_k_dense or cfg.n_experts == 0
        for t, x in enumerate(stream):
            normed = rms_norm(x, w[f"{block}.norm2.weight"], cfg.norm_eps)
            ffn = swiglu(w, f"{block}.ffn", normed) if dense else None
            stream[t] = add(x, ffn or experts(w, f"{block}.ffn", normed, cfg))
    final = [rms_norm(x, w["norm_f.weight"], cfg.norm_eps) for x in stream]
    return torch.tensor([times(w["lm_head.weight"], x) for x in final], dtype=torch.float64)
