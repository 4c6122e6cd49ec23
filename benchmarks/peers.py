"""The same decoder in the classes of others, holding the same weights.

transformers has every part of it but the shared expert beside its Qwen3-MoE block, so that is
added to the stock class (`WithShared`); litgpt has all of it."""

import torch
from torch import nn


class WithShared(nn.Module):
    """A routed block plus the shared expert that Qwen3-MoE lacks."""

    def __init__(self, routed, shared):
        super().__init__()
        self.routed, self.shared = routed, shared

    def forward(self, x):
        return self.routed(x) + self.shared(x)


def qwen3_config(cfg):
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.d_model,
        num_hidden_layers=cfg.n_layers,
        num_attention_heads=cfg.n_heads,
        num_key_value_heads=cfg.n_kv_heads,
        head_dim=cfg.d_head,
        intermediate_size=cfg.d_ff,
        moe_intermediate_size=cfg.d_expert,
        num_experts=cfg.n_experts,
        num_experts_per_tok=cfg.n_experts_active,
        norm_topk_prob=True,
        mlp_only_layers=list(range(cfg.first_k_dense)),
        decoder_sparse_step=1,
        rms_norm_eps=cfg.norm_eps,
        max_position_embeddings=cfg.max_seq_len,
        tie_word_embeddings=cfg.tied,
        rope_parameters={"rope_type": "default", "rope_theta": cfg.rope_theta},
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


@torch.no_grad()
def qwen3_of(model):
    """`model` as transformers' Qwen3MoeForCausalLM with the shared expert added."""
    from transformers import Qwen3MoeForCausalLM
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeMLP

    config = qwen3_config(model.cfg)
    peer = Qwen3MoeForCausalLM(config)
    weights = {
        "model.embed_tokens.weight": model.embed.weight,
        "lm_head.weight": model.lm_head.weight,
        "model.norm.weight": model.norm_f.weight,
    }
    for i, block in enumerate(model.blocks):
        weights |= {f"model.layers.{i}.{k}": v for k, v in qwen3_block(block).items()}
    peer.load_state_dict(weights)
    for block, layer in zip(model.blocks, peer.model.layers, strict=True):
        if block.is_moe and len(block.ffn.shared):
            shared = Qwen3MoeMLP(config, intermediate_size=model.cfg.d_expert)
            shared.load_state_dict(qwen3_ffn(block.ffn.shared[0]))
            layer.mlp = WithShared(layer.mlp, shared)
    return peer.eval()


def qwen3_block(block) -> dict:
    attn, ffn = block.attn, block.ffn
    weights = {
        "input_layernorm.weight": block.norm1.weight,
        "post_attention_layernorm.weight": block.norm2.weight,
        "self_attn.q_proj.weight": attn.W_q.weight,
        "self_attn.k_proj.weight": attn.W_k.weight,
        "self_attn.v_proj.weight": attn.W_v.weight,
        "self_attn.o_proj.weight": attn.W_o.weight,
        "self_attn.q_norm.weight": attn.q_norm.weight,
        "self_attn.k_norm.weight": attn.k_norm.weight,
    }
    if not block.is_moe:
        return weights | {f"mlp.{k}": v for k, v in qwen3_ffn(ffn).items()}
    gate_up = [torch.cat((e.w_gate.weight, e.w_up.weight)) for e in ffn.experts]
    return weights | {
        "mlp.gate.weight": ffn.gate.weight,
        "mlp.experts.gate_up_proj": torch.stack(gate_up),
        "mlp.experts.down_proj": torch.stack([e.w_down.weight for e in ffn.experts]),
    }


def qwen3_ffn(ffn) -> dict:
    return {
        "gate_proj.weight": ffn.w_gate.weight,
        "up_proj.weight": ffn.w_up.weight,
        "down_proj.weight": ffn.w_down.weight,
    }
