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


def sizes(cfg) -> dict:
    """What the configurations of all transformers classes here have in common."""
    return dict(
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.d_model,
        num_hidden_layers=cfg.n_layers,
        num_attention_heads=cfg.n_heads,
        num_key_value_heads=cfg.n_kv_heads,
        head_dim=cfg.d_head,
        intermediate_size=cfg.d_ff,
        rms_norm_eps=cfg.norm_eps,
        max_position_embeddings=cfg.max_seq_len,
        tie_word_embeddings=cfg.tied,
        rope_parameters={"rope_type": "default", "rope_theta": cfg.rope_theta},
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def fill(peer, model, block_of):
    """Give `peer` the weights of `model`, those of a block as block_of names them."""
    weights = {
        "model.embed_tokens.weight": model.embed.weight,
        "lm_head.weight": model.lm_head.weight,
        "model.norm.weight": model.norm_f.weight,
    }
    for i, block in enumerate(model.blocks):
        weights |= {f"model.layers.{i}.{k}": v for k, v in block_of(block).items()}
    peer.load_state_dict(weights)
    return peer.eval()


@torch.no_grad()
def qwen3_of(model):
    """`model` as transformers' Qwen3MoeForCausalLM with the shared expert added."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeMLP

    cfg = model.cfg
    config = Qwen3MoeConfig(
        **sizes(cfg),
        moe_intermediate_size=cfg.d_expert,
        num_experts=cfg.n_experts,
        num_experts_per_tok=cfg.n_experts_active,
        norm_topk_prob=True,
        mlp_only_layers=list(range(cfg.first_k_dense)),
        decoder_sparse_step=1,
    )
    peer = fill(Qwen3MoeForCausalLM(config), model, qwen3_block)
    for block, layer in zip(model.blocks, peer.model.layers, strict=True):
        if block.is_moe and len(block.ffn.shared):
            shared = Qwen3MoeMLP(config, intermediate_size=cfg.d_expert)
            shared.load_state_dict(qwen3_ffn(block.ffn.shared[0]))
            layer.mlp = WithShared(layer.mlp, shared)
    return peer.eval()


def attention_block(block) -> dict:
    """Norms and projections, named as transformers names them in all of these classes."""
    attn = block.attn
    return {
        "input_layernorm.weight": block.norm1.weight,
        "post_attention_layernorm.weight": block.norm2.weight,
        "self_attn.q_proj.weight": attn.W_q.weight,
        "self_attn.k_proj.weight": attn.W_k.weight,
        "self_attn.v_proj.weight": attn.W_v.weight,
        "self_attn.o_proj.weight": attn.W_o.weight,
    }


def dense_block(block) -> dict:
    return attention_block(block) | {f"mlp.{k}": v for k, v in qwen3_ffn(block.ffn).items()}


def qwen3_block(block) -> dict:
    attn, ffn = block.attn, block.ffn
    norms = {
        "self_attn.q_norm.weight": attn.q_norm.weight,
        "self_attn.k_norm.weight": attn.k_norm.weight,
    }
    if not block.is_moe:
        return dense_block(block) | norms
    weights = attention_block(block) | norms
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


@torch.no_grad()
def llama_of(model):
    """A dense `model` without QK-Norm as transformers' LlamaForCausalLM."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return fill(LlamaForCausalLM(LlamaConfig(**sizes(model.cfg))), model, dense_block)


def litgpt_of(model):
    """`model` as litgpt's GPT, which has every part of it."""
    from litgpt.config import Config
    from litgpt.model import GPT

    cfg = model.cfg
    config = Config(
        name="course",
        block_size=cfg.max_seq_len,
        n_layer=cfg.n_layers,
        n_embd=cfg.d_model,
        vocab_size=cfg.vocab_size,
        padded_vocab_size=cfg.vocab_size,
        norm_class_name="RMSNorm",
        norm_eps=cfg.norm_eps,
        norm_qk=True,
        parallel_residual=False,
        n_head=cfg.n_heads,
        head_size=cfg.d_head,
        n_query_groups=cfg.n_kv_heads,
        bias=False,
        rope_base=int(cfg.rope_theta),
        rotary_percentage=1.0,
        mlp_class_name="LLaMAMoE",
        intermediate_size=cfg.d_ff,
        moe_intermediate_size=cfg.d_expert,
        n_expert=cfg.n_experts,
        n_expert_per_token=cfg.n_experts_active,
        n_shared_expert=cfg.n_shared_experts,
        first_k_dense_replace=cfg.first_k_dense,
        norm_topk_prob=True,
    )
    peer = GPT(config)
    weights = {
        "lm_head.weight": model.lm_head.weight,
        "transformer.wte.weight": model.embed.weight,
        "transformer.ln_f.weight": model.norm_f.weight,
    }
    for i, block in enumerate(model.blocks):
        weights |= {f"transformer.h.{i}.{k}": v for k, v in litgpt_block(block).items()}
    peer.load_state_dict(weights)
    peer.lm_head.weight = peer.transformer.wte.weight
    return peer.eval()


def litgpt_block(block) -> dict:
    attn, ffn = block.attn, block.ffn
    weights = {
        "norm_1.weight": block.norm1.weight,
        "norm_2.weight": block.norm2.weight,
        "attn.qkv.weight": torch.cat((attn.W_q.weight, attn.W_k.weight, attn.W_v.weight)),
        "attn.proj.weight": attn.W_o.weight,
        "attn.norm_q.weight": attn.q_norm.weight,
        "attn.norm_k.weight": attn.k_norm.weight,
    }
    if not block.is_moe:
        return weights | litgpt_ffn("mlp.", ffn)
    weights["mlp.gate.weight"] = ffn.gate.weight
    weights |= litgpt_ffn("mlp.shared_experts.", ffn.shared[0])
    for j, expert in enumerate(ffn.experts):
        weights |= litgpt_ffn(f"mlp.experts.{j}.", expert)
    return weights


def litgpt_ffn(prefix: str, ffn) -> dict:
    return {
        f"{prefix}fc_1.weight": ffn.w_gate.weight,
        f"{prefix}fc_2.weight": ffn.w_up.weight,
        f"{prefix}proj.weight": ffn.w_down.weight,
    }
