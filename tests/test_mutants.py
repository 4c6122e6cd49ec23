"""Every check seen failing: the library with one telling fault each, and a test that notices.

A mutant changes one place of a source file. The changed file is compiled, and the code and
defaults of its functions are put into the live functions, so that whoever imported them runs the
fault too; afterwards all is put back.
"""

import contextlib
import functools
import importlib
import inspect
from pathlib import Path

import pytest
import torch
from _pytest.outcomes import Failed

import course_lib
from tests import test_properties as properties
from tests import test_refusals as refusals
from tests import test_spec as spec
from tests import test_trace as traces
from tests.cases import test_attention as attention
from tests.cases import test_cache as cache
from tests.cases import test_checkpoints_and_counts as counts
from tests.cases import test_generation as generation
from tests.cases import test_moe as moe
from tests.cases import test_norms as norms
from tests.cases import test_position as position
from tests.cases import test_training as training
from tests.model import test_decoder as decoder
from tests.model import test_moe as routing
from tests.model import test_parts_alone as parts
from tests.serving import test_cache as contract
from tests.serving import test_generate as generates
from tests.training import test_loop as loop
from tests.zoo import test_counts as zoo_counts

PACKAGE = Path(course_lib.__file__).parent


on = functools.partial  # a test with the arguments that make it tell


def independent(**changes):
    return on(decoder.test_logits_equal_an_independent_decoder, changes)


def refuses(text: str):
    """The row of the tables whose message begins with `text`."""
    rows = [row for row in refusals.CONFIGS if row[1] == text]
    if rows:
        return on(refusals.test_a_bad_config_is_refused, rows[0])
    row = next(row for row in refusals.CALLS if row[1] == text)
    return on(refusals.test_a_bad_call_is_refused_and_changes_nothing, row)


MUTANTS = {
    # what -> file, the right text, the wrong text, tests that must notice
    "RoPE turns the other way": (
        "model/rope.py",
        "turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)",
        "turned = torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)",
        [position.test_a01_pairing_convention, independent(), spec.test_training_step_and_prompt],
    ),
    "interleaved pairs in the half-split form": (
        "model/rope.py",
        "a, b = turned.chunk(2, dim=-1)",
        "a, b = turned[..., 0::2], turned[..., 1::2]",
        [position.test_a01_pairing_convention, independent()],
    ),
    "frequencies with another exponent": (
        "model/rope.py",
        "return theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)",
        "return theta ** (-torch.arange(0, d // 2, dtype=torch.float64) / d)",
        [position.test_a01_pairing_convention, independent()],
    ),
    "angles in the dtype of the caller": (
        "model/rope.py",
        "freq = freq.to(positions.device, torch.float32)",
        "freq, positions = freq.bfloat16(), positions.bfloat16()",
        [position.test_a03_low_precision_angle_table],
    ),
    "a table shorter than the text is taken": (
        "model/rope.py",
        "cos.shape[-2] == x.shape[-2],",
        "True,",
        [position.test_a07_table_shorter_than_the_sequence],
    ),
    "llama3 scaling is computed and dropped": (
        "model/rope.py",
        "freq = scale_llama3(freq, scaling)",
        "scale_llama3(freq, scaling)",
        [position.test_a05_llama3_frequency_scaling],
    ),
    "YaRN's attention factor is lost": (
        "model/rope.py",
        "return angles.cos() * self.magnitude, angles.sin() * self.magnitude",
        "return angles.cos(), angles.sin()",
        [position.test_a06_yarn],
    ),
    "rope_theta has another default": (
        "model/config.py",
        "rope_theta: float = 10000.0",
        "rope_theta: float = 500000.0",
        [spec.test_fields_and_defaults, spec.test_training_step_and_prompt],
    ),
    "another key/value head count by default": (
        "model/config.py",
        "n_kv_heads: int = 2",
        "n_kv_heads: int = 4",
        [spec.test_parameters, spec.test_shape_trace_and_expert_usage],
    ),
    "the causal diagonal starts in the upper left": (
        "model/masks.py",
        "query = torch.arange(S - T, S, device=device).unsqueeze(1)  # its index as a key",
        "query = torch.arange(T, device=device).unsqueeze(1)",
        [
            on(attention.test_a13_causal_flag_with_fewer_queries_than_keys, "sdpa"),
            on(spec.test_cache_equivalence_at_every_position, 8, 1),
        ],
    ),
    "a bare causal flag for every chunk": (
        "model/attention.py",
        "if mask is None and T != S and T > 1:",
        "if False:",
        [
            on(attention.test_a13_causal_flag_with_fewer_queries_than_keys, "sdpa"),
            on(spec.test_cache_equivalence_at_every_position, 0, 2),
            on(properties.test_cached_equals_uncached_at_every_position, "multi-head", 1),
        ],
    ),
    "the mask shows the future": (
        "model/masks.py",
        "allowed = key <= query",
        "allowed = key >= query",
        [on(attention.test_a15_polarity_of_boolean_masks, "explicit")],
    ),
    "a query does not see itself": (
        "model/masks.py",
        "allowed = key <= query",
        "allowed = key < query",
        [on(attention.test_a13_causal_flag_with_fewer_queries_than_keys, "explicit")],
    ),
    "the window does not count the token itself": (
        "model/masks.py",
        "(key > query - window)",
        "(key >= query - window)",
        [on(attention.test_a17_sliding_window_width, "sdpa")],
    ),
    "padding keys are seen": (
        "model/masks.py",
        "return causal & real[:, None, None, :] & real[:, None, S - T :, None]",
        "return causal & real[:, None, S - T :, None]",
        [
            on(properties.test_a_left_padded_row_equals_its_single_run, "default"),
            on(attention.test_a14_rows_that_may_attend_to_nothing, "sdpa"),
        ],
    ),
    "positions count the padding": (
        "model/masks.py",
        "return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)",
        "return attention_mask.long().cumsum(-1)",
        [cache.test_a21_positions_of_a_left_padded_batch],
    ),
    "documents see each other": (
        "model/masks.py",
        "return (same & causal).unsqueeze(1)",
        "return (same | causal).unsqueeze(1)",
        [training.test_a45_packed_documents],
    ),
    "ALiBi's slopes are one head off": (
        "model/masks.py",
        "torch.arange(1, n_heads + 1, device=device) / n_heads",
        "torch.arange(n_heads, device=device) / n_heads",
        [parts.test_alibi_slopes_and_distances],
    ),
    "key/value heads are tiled": (
        "model/attention.py",
        "k = self.see_k(k.repeat_interleave(group, dim=1))",
        "k = self.see_k(k.repeat(1, group, 1, 1))",
        [on(properties.test_explicit_scores_equal_the_fused_kernel, "default")],
    ),
    "values are tiled": (
        "model/attention.py",
        "v = self.see_v(v.repeat_interleave(group, dim=1))",
        "v = self.see_v(v.repeat(1, group, 1, 1))",
        [on(attention.test_a16_expansion_of_kv_heads, "explicit")],
    ),
    "a fully masked row is NaN": (
        "model/attention.py",
        "scores = scores.masked_fill(nothing, 0)",
        "pass",
        [on(attention.test_a14_rows_that_may_attend_to_nothing, "explicit")],
    ),
    "the sink takes its share of the values too": (
        "model/attention.py",
        "return weights[..., : -1 if sink is not None else None].masked_fill(nothing, 0)",
        "w = weights[..., : -1 if sink is not None else None]\n"
        "    return (w / w.sum(-1, keepdim=True)).masked_fill(nothing, 0)",
        [attention.test_a18_attention_sinks],
    ),
    "the scale forgets the root": (
        "model/attention.py",
        "self.core = AttentionCore(cfg, scale=1 / math.sqrt(self.d_head))",
        "self.core = AttentionCore(cfg, scale=1 / self.d_head)",
        [independent(), spec.test_training_step_and_prompt],
    ),
    "QK-Norm after RoPE": (
        "model/attention.py",
        "q = self.see_q_rotated(self.rotate(self.q_norm(q), cos, sin))",
        "q = self.see_q_rotated(self.q_norm(self.rotate(q, cos, sin)))",
        [norms.test_a12_qk_norm_and_rope_order, independent()],
    ),
    "V is rotated": (
        "model/attention.py",
        "k = self.see_k_rotated(self.rotate(self.k_norm(k), cos, sin))",
        "k = self.see_k_rotated(self.rotate(self.k_norm(k), cos, sin))\n"
        "        v = self.rotate(v, cos, sin)",
        [independent(), on(properties.test_only_distances_between_positions_count, "default")],
    ),
    "heads are concatenated in the wrong order": (
        "model/attention.py",
        "return x.transpose(1, 2).flatten(2)",
        "return x.flatten(1).view(x.shape[0], x.shape[2], -1)",
        [independent()],
    ),
    "MLA's scale is that of the latent": (
        "model/mla.py",
        "scale = 1 / math.sqrt(part.d_nope + part.d_rope)",
        "scale = 1 / math.sqrt(part.kv_lora_rank + part.d_rope)",
        [attention.test_a20_mla_scale_and_absorption],
    ),
    "MLA caches the key before it is rotated": (
        "model/mla.py",
        "k_rope = self.see_k_rope(self.rotate(k_rope.unsqueeze(1), cos, sin).squeeze(1))",
        "k_rope = self.see_k_rope(k_rope)",
        [on(properties.test_only_distances_between_positions_count, "MLA absorbed")],
    ),
    "epsilon outside the root": (
        "model/norm.py",
        "inverse_rms = torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)",
        "inverse_rms = 1 / (x32.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)",
        [norms.test_a09_place_of_epsilon, independent(norm_eps=0.1)],
    ),
    "the norm in the dtype of the input": (
        "model/norm.py",
        "x32 = x.float()",
        "x32 = x",
        [norms.test_a10_fp16_overflow],
    ),
    "the gain after the cast": (
        "model/norm.py",
        "return (x32 * inverse_rms * self.weight.float()).to(x.dtype)",
        "return (x32 * inverse_rms).to(x.dtype) * self.weight",
        [norms.test_a11_gain_before_or_after_the_cast],
    ),
    "SiLU on the wrong branch": (
        "model/ffn.py",
        "F.silu(self.w_gate(x)) * self.w_up(x)",
        "self.w_gate(x) * F.silu(self.w_up(x))",
        [independent()],
    ),
    "post-norm": (
        "model/decoder.py",
        "x = self.see_after_attn(x + self.attn(self.norm1(x), cos, sin, cache, mask))",
        "x = self.see_after_attn(self.norm1(x + self.attn(x, cos, sin, cache, mask)))",
        [independent(), decoder.test_a_block_adds_to_the_stream_and_never_normalises_it],
    ),
    "the final norm is left out": (
        "model/decoder.py",
        "return self.lm_head(self.norm_f(x)), router_logits",
        "return self.lm_head(x), router_logits",
        [independent(), on(spec.test_training_step_and_prompt)],
    ),
    "pos_offset stays 0": (
        "model/decoder.py",
        "first, last = pos_offset, pos_offset + T - 1",
        "first, last = 0, T - 1",
        [
            on(spec.test_cache_equivalence_at_every_position, 8, 1),
            position.test_a07_table_shorter_than_the_sequence,
        ],
    ),
    "the end of the table is not checked": (
        "model/decoder.py",
        "last < self.cfg.max_seq_len,",
        "True,",
        [position.test_a07_table_shorter_than_the_sequence],
    ),
    "another initial spread": (
        "model/decoder.py",
        "nn.init.normal_(module.weight, mean=0.0, std=0.02)",
        "nn.init.normal_(module.weight, mean=0.0, std=0.2)",
        [
            decoder.test_init_draws_every_matrix_small_and_leaves_gains_at_1,
            training.test_a44_initial_loss,
        ],
    ),
    "moving a model unties it": (
        "model/decoder.py",
        "super()._apply(fn, recurse)\n        self.tie()",
        "super()._apply(fn, recurse)",
        [training.test_a41_weight_tying],
    ),
    "assign=True unties it": (
        "model/decoder.py",
        "assign=assign)\n        self.tie()",
        "assign=assign)",
        [training.test_a41_weight_tying],
    ),
    "the first layers are routed too": (
        "model/config.py",
        "layer >= self.first_k_dense",
        "layer > self.first_k_dense",
        [spec.test_parameters, independent()],
    ),
    "softmax over all experts": (
        "model/moe.py",
        'return logits if kind == "softmax_selected" else logits.softmax(-1)',
        "return logits.softmax(-1)",
        [moe.test_a29_softmax_and_top_k, independent()],
    ),
    "the chosen weights are not normalised": (
        "model/moe.py",
        "weights = weights.softmax(-1)",
        "weights = router_logits.softmax(-1).gather(-1, chosen)",
        [moe.test_a29_softmax_and_top_k, independent()],
    ),
    "weights from the biased scores": (
        "model/moe.py",
        "weights = scores.gather(-1, chosen)",
        "weights = ranked.gather(-1, chosen)",
        [moe.test_a36_bias_corrected_sigmoid_routing],
    ),
    "the selection bias is ignored": (
        "model/moe.py",
        "ranked = scores if bias is None else scores + bias",
        "ranked = scores",
        [moe.test_a36_bias_corrected_sigmoid_routing],
    ),
    "sigmoids that round to 0 are divided by 0": (
        "model/moe.py",
        "weights.sum(-1, keepdim=True).clamp(min=1e-20)",
        "weights.sum(-1, keepdim=True)",
        [moe.test_a36_bias_corrected_sigmoid_routing],
    ),
    "closed groups get 0 instead of -inf": (
        "model/moe.py",
        "return grouped.masked_fill(closed.unsqueeze(-1), -torch.inf).flatten(-2)",
        "return grouped.masked_fill(closed.unsqueeze(-1), 0.0).flatten(-2)",
        [routing.test_an_expert_of_a_closed_group_never_wins],
    ),
    "repeated slots overwrite each other": (
        "model/moe.py",
        "return torch.zeros_like(flat).index_add(0, token, weighted)",
        "return torch.zeros_like(flat).index_copy(0, token, weighted)",
        [
            on(moe.test_a34_adding_through_repeated_indices, moe.combine_sorted),
            on(properties.test_loop_and_sorted_experts_agree_gradients_included, "default"),
        ],
    ),
    "an expert without tokens is skipped": (
        "model/moe.py",
        "token, slot = torch.where(chosen == e)",
        "token, slot = torch.where(chosen == e)\n        if not len(token): continue",
        [on(moe.test_a35_an_expert_without_tokens, "loop")],
    ),
    "the shared expert is left out": (
        "model/moe.py",
        "out = out + expert(flat)",
        "pass",
        [independent()],
    ),
    "capacity is rounded down": (
        "model/capacity.py",
        "math.ceil(round(",
        "math.floor(round(",
        [moe.test_a38_capacity],
    ),
    "padding takes places": (
        "model/capacity.py",
        "& real.to(chosen.device)[:, None, None]",
        "",
        [moe.test_a38_capacity],
    ),
    "the chunk after the cached tokens overwrites them": (
        "serving/cache.py",
        "buffer[..., self.length : self.length + n, :] = tensor.detach()",
        "buffer[..., :n, :] = tensor.detach()",
        [
            on(spec.test_cache_equivalence_at_every_position, 8, 1),
            on(contract.test_update_returns_all_so_far, contract.KINDS["fixed"]),
        ],
    ),
    "the cache does not check its room": (
        "serving/cache.py",
        "full = self.capacity is not None and self.length + n > self.capacity",
        "full = False",
        [cache.test_a23_writing_past_the_capacity],
    ),
    "a growing cache loses what it held": (
        "serving/cache.py",
        "target[..., : self.length, :] = source",
        "pass",
        [on(contract.test_update_returns_all_so_far, contract.KINDS["growing"])],
    ),
    "the rolling cache keeps one too many": (
        "serving/cache.py",
        "self.kept = [t[..., -self.window :, :].clone() for t in seen]",
        "self.kept = [t[..., -self.window - 1 :, :].clone() for t in seen]",
        [cache.test_a28_rotating_cache_and_multi_token_appends],
    ),
    "the rolling cache hides keys from a chunk": (
        "serving/cache.py",
        "return tuple(seen)",
        "return tuple(self.kept)",
        [cache.test_a28_rotating_cache_and_multi_token_appends],
    ),
    "a trimmed cache remembers": (
        "serving/cache.py",
        "check_trim(n, self.length)\n        self.length -= n",
        "check_trim(n, self.length)",
        [on(contract.test_trim_forgets_the_last, contract.KINDS["growing"])],
    ),
    "beams are scattered": (
        "serving/cache.py",
        "buffer.index_select(0, rows) for buffer in",
        "torch.zeros_like(buffer).index_copy(0, rows, buffer) for buffer in",
        [on(cache.test_a24_beam_reorder, cache.KVCache)],
    ),
    "another dtype is cast in silence": (
        "serving/cache.py",
        "now == before,",
        "True,",
        [cache.test_a25_dtypes],
    ),
    "division by a temperature that float32 rounds to 0": (
        "serving/sampling.py",
        "/ max(temperature, TINY)",
        "/ temperature",
        [generation.test_a47_temperature_0],
    ),
    "temperature 0 draws": (
        "serving/sampling.py",
        "if temperature == 0:\n        return",
        "if False:\n        return",
        [generation.test_a47_temperature_0],
    ),
    "top-p does not keep the token that reaches p": (
        "serving/sampling.py",
        "before = probs.cumsum(-1) - probs",
        "before = probs.cumsum(-1)",
        [generation.test_a48_top_k_and_top_p_limits],
    ),
    "top-k beyond the vocabulary": (
        "serving/sampling.py",
        "k = min(k, logits.shape[-1])",
        "k = k",
        [generation.test_a48_top_k_and_top_p_limits],
    ),
    "finished rows go on sampling": (
        "serving/generate.py",
        "token = token.masked_fill(done, pad_id)",
        "token = token",
        [on(generation.test_a49_eos_in_a_batch, True)],
    ),
    "the loop waits for all rows at once": (
        "serving/generate.py",
        "return token.unsqueeze(1), done | ended",
        "return token.unsqueeze(1), ended",
        [on(generation.test_a49_eos_in_a_batch, True)],
    ),
    "the padding is forgotten in prefill": (
        "serving/generate.py",
        "real if first else None)",
        "None)",
        [on(properties.test_greedy_text_is_the_same_with_and_without_cache_and_padding, "default")],
    ),
    "one position too few": (
        "serving/generate.py",
        "needed = longest + max(n, 1) - 1",
        "needed = longest + n",
        [generates.test_text_may_fill_every_position_and_not_one_more],
    ),
    "labels are not shifted": (
        "training/objective.py",
        "logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()",
        "logits.flatten(0, 1).float(), ids.flatten()",
        [training.test_a39_label_shift, spec.test_training_step_and_prompt],
    ),
    "ignored tokens count in the mean": (
        "training/objective.py",
        "return total / (targets != ignore_index).sum().clamp(min=1)",
        "return total / targets.numel()",
        [loop.test_the_loss_is_the_mean_over_the_next_tokens],
    ),
    "nothing to predict is 0 / 0": (
        "training/objective.py",
        "return total / (targets != ignore_index).sum().clamp(min=1)",
        "return total / (targets != ignore_index).sum()",
        [loop.test_nothing_to_predict_costs_nothing],
    ),
    "alpha has another default": (
        "training/objective.py",
        "    model, router_logits: list[Tensor], alpha: float = ALPHA,",
        "    model, router_logits: list[Tensor], alpha: float = 0.001,",
        [loop.test_alpha_weighs_the_balance_loss_and_dense_models_have_none],
    ),
    "alpha of one layer has another default": (
        "training/objective.py",
        "    n_experts: int,\n    alpha: float = ALPHA,",
        "    n_experts: int,\n    alpha: float = 0.02,",
        [loop.test_alpha_weighs_the_balance_loss_and_dense_models_have_none],
    ),
    "alpha of the step has another default": (
        "training/loop.py",
        "    targets: Tensor | None = None,\n    alpha: float = ALPHA,",
        "    targets: Tensor | None = None,\n    alpha: float = 0.02,",
        [spec.test_training_step_and_prompt],
    ),
    "the balance loss forgets E": (
        "training/objective.py",
        "loss = alpha * n_experts * (f * P).sum()",
        "loss = alpha * (f * P).sum()",
        [moe.test_a30_load_balancing_loss, spec.test_training_step_and_prompt],
    ),
    "padding counts in the balance": (
        "training/objective.py",
        "keep = topk_idx.new_ones(N, dtype=torch.bool) if real is None else real.bool()",
        "keep = topk_idx.new_ones(N, dtype=torch.bool)",
        [moe.test_a32_padding_in_the_loss, loop.test_padding_takes_no_part_in_the_balance],
    ),
    "gradients add up over steps": (
        "training/loop.py",
        "optimizer.zero_grad(set_to_none=True)",
        "pass",
        [loop.test_old_gradients_do_not_add_up],
    ),
    "a NaN loss moves the weights": (
        "training/loop.py",
        'check_finite("loss", loss)',
        "pass",
        [refuses("loss=nan")],
    ),
    "an infinite gradient moves the weights": (
        "training/loop.py",
        'check_finite("grad_norm", grad_norm)',
        "pass",
        [refusals.test_a_step_of_infinite_gradient_moves_no_weight],
    ),
    "the step before its checks": (
        "training/loop.py",
        "    require(\n        max_norm is None",
        "    optimizer.step()\n    require(\n        max_norm is None",
        [refuses("max_norm=0")],
    ),
    "caches are marked before the checks": (
        "model/decoder.py",
        "        check_pos_offset(pos_offset)\n",
        "        for cache in caches or []:\n            cache.real = attention_mask\n",
        [refuses("attention_mask=(2, 5)")],
    ),
    "one cache for all layers is taken": (
        "model/inputs.py",
        "different == len(caches),",
        "True,",
        [refuses("caches=3")],
    ),
    "a message without its value": (
        "model/checks.py",
        'f"{name}={value!r} is not a whole number of at least {least}."',
        'f"{name} is not a whole number."',
        [refuses("vocab_size=0")],
    ),
    "True counts as 1": (
        "model/checks.py",
        "return isinstance(value, int) and not isinstance(value, bool) and value >= least",
        "return isinstance(value, int) and value >= least",
        [refuses("n_layers=True")],
    ),
    "active parameters are total k / E": (
        "zoo/counts.py",
        "return self.total - self.routed + self.routed_active",
        "return self.total * self.routed_active // max(self.routed, 1)",
        [counts.test_a71_moe_parameters, spec.test_parameters],
    ),
    "the embedding is multiplied": (
        "zoo/counts.py",
        "met = count.active - count.embedding - count.head - norms + head",
        "met = count.active - count.head - norms + head",
        [counts.test_a72_flops, on(zoo_counts.test_counted_flops_are_the_recorded_ones, "default")],
    ),
    "the cache counts query heads": (
        "model/attention.py",
        'return {"k": (self.H_kv, self.d_head), "v": (self.H_kv, self.d_head)}',
        'return {"k": (self.H, self.d_head), "v": (self.H, self.d_head)}',
        [counts.test_a73_kv_cache_bytes],
    ),
    "a stray head is swallowed": (
        "model/decoder.py",
        "not both or torch.equal(head, embed),",
        "True,",
        [counts.test_a56_an_untied_head_is_not_swallowed_by_a_tied_model],
    ),
    "products before the core are not counted": (
        "trace.py",
        "self.flops_before += self.flops_so_far() - self.flops_at_core",
        "self.flops_before = self.flops_so_far()",
        [on(zoo_counts.test_counted_flops_are_the_recorded_ones, "MLA naive")],
    ),
    "NaN agrees with everything": (
        "trace.py",
        '.nan_to_num(float("inf"))',
        ".nan_to_num(0.0)",
        [traces.test_diverge_names_the_first_stage_that_differs],
    ),
}


def functions_of(module) -> dict[str, object]:
    """Every function of a module and of its classes, properties included, by its path."""
    found = {}
    for name, thing in vars(module).items():
        if inspect.isfunction(thing) and thing.__module__ == module.__name__:
            found[name] = thing
        elif inspect.isclass(thing) and thing.__module__ == module.__name__:
            for inner, member in vars(thing).items():
                member = member.fget if isinstance(member, property) else member
                if inspect.isfunction(member):
                    found[f"{name}.{inner}"] = member
    return found


def mutated(file: str, right: str, wrong: str):
    """The live module, and a copy compiled from its text with `right` replaced."""
    path = PACKAGE / file
    text = path.read_text(encoding="utf-8")
    assert text.count(right) >= 1, f"{file} has no {right!r} any more: update the mutant."
    assert text.count(right) == 1, f"{file} has {right!r} more than once."
    live = importlib.import_module("course_lib." + file.removesuffix(".py").replace("/", "."))
    copy = type(live)(live.__name__)
    copy.__dict__.update(__package__=live.__package__, __file__=live.__file__)
    exec(compile(text.replace(right, wrong), str(path), "exec"), copy.__dict__)
    return live, copy


@contextlib.contextmanager
def fault(file: str, right: str, wrong: str):
    """Within it the library runs the fault."""
    live, copy = mutated(file, right, wrong)
    ours, theirs = functions_of(live), functions_of(copy)
    kept = {name: (f.__code__, f.__defaults__, f.__kwdefaults__) for name, f in ours.items()}
    properties.decoder.cache_clear(), spec.default_model.cache_clear()
    refusals.world.cache_clear()
    try:
        for name, function in ours.items():
            other = theirs[name]
            function.__code__, function.__defaults__ = other.__code__, other.__defaults__
            function.__kwdefaults__ = other.__kwdefaults__
        yield
    finally:
        for name, function in ours.items():
            function.__code__, function.__defaults__, function.__kwdefaults__ = kept[name]
        properties.decoder.cache_clear(), spec.default_model.cache_clear()
        refusals.world.cache_clear()


@pytest.mark.parametrize("what", MUTANTS)
def test_a_fault_is_noticed(what):
    file, right, wrong, tests = MUTANTS[what]
    assert tests
    with torch.random.fork_rng(devices=[]):
        for test in tests:
            with fault(file, right, wrong):
                with pytest.raises((Exception, Failed)):  # whatever makes a test fail
                    test()


def test_without_a_fault_the_same_tests_pass():
    every = {repr(test): test for *_, tests in MUTANTS.values() for test in tests}
    with torch.random.fork_rng(devices=[]):
        for test in every.values():
            test()


def test_the_live_functions_are_put_back():
    file, right, wrong, _ = MUTANTS["RoPE turns the other way"]
    with pytest.raises(AssertionError), fault(file, right, wrong):
        position.test_a01_pairing_convention()
    position.test_a01_pairing_convention()
