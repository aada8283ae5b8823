"""The planted faults: what is changed, and which tests must notice."""

from typing import NamedTuple

ROUTER = "lumina_ft/kernels/router/ref.py"
ATTENTION_RULE = "lumina_ft/kernels/attention/ref.py"
SEGMENTED = "lumina_ft/kernels/attention/segmented.py"
ATTENTION = "lumina_ft/models/attention.py"
HEADS = "lumina_ft/models/u2_heads.py"
EXPERTS = "lumina_ft/models/experts.py"
EXPERT_PARALLEL = "lumina_ft/parallel/expert_parallel.py"
EXPERT_LAYOUT = "lumina_ft/adapters/expert_layout.py"
ZERO3 = "lumina_ft/parallel/zero3.py"
TILE_KERNEL = "lumina_ft/kernels/attention/kernel.py"
EXPERT_KERNEL = "lumina_ft/kernels/moe/kernel_forward.py"

GATE_TESTS = ("tests/parity/test_gate.py",)
BACKBONE_TESTS = ("tests/parity/test_backbone.py",)
FORWARD_TESTS = ("tests/parity/test_forward.py",)
MASK_TESTS = ("tests/parity/test_attention_mask.py",)
SHARED_EXPERTS_TESTS = ("tests/dist/test_expert_parallel.py",)
EXPERT_ADAPTER_TESTS = ("tests/unit/adapters/test_expert_adapter.py",)
INTERPRETER = "tests/interpreter/"
TILE_TESTS = (f"{INTERPRETER}test_tiled_attention.py",)
FAR_TESTS = (f"{INTERPRETER}test_wide_offsets.py",)
FUSED_TESTS = (f"{INTERPRETER}test_fused_experts.py::test_float32_equals_float64",)
FAR_EXPERT_TESTS = (f"{INTERPRETER}test_fused_experts.py::test_offsets_beyond_int32",)
FUSED_LORA_TESTS = (f"{INTERPRETER}test_fused_lora.py::test_frozen_base",)


class Fault(NamedTuple):
    """One mistake: every edit is (file, text that occurs once, its replacement)."""

    name: str
    edits: tuple[tuple[str, str, str], ...]
    tests: tuple[str, ...]

    @property
    def interpreted(self) -> bool:
        """Whether the tests interpret Triton kernels, which takes a process of its own."""
        return self.tests[0].startswith(INTERPRETER)


FAULTS = (
    Fault("softmax_for_sigmoid", ((ROUTER, "logits.sigmoid()", "logits.softmax(-1)"),), GATE_TESTS),
    Fault(
        "biased_scores_as_weights",
        ((ROUTER, "chosen = scores.gather(-1, topk_idx)", "chosen = biased.gather(-1, topk_idx)"),),
        GATE_TESTS,
    ),
    Fault("no_group_limit", ((ROUTER, "if kept_groups < num_groups:", "if kept_groups < 0:"),), GATE_TESTS),
    Fault(
        "scaling_dropped",
        ((ROUTER, "(chosen.sum(-1, keepdim=True) + 1e-20) * scaling", "(chosen.sum(-1, keepdim=True) + 1e-20)"),),
        GATE_TESTS,
    ),
    Fault(
        "normalisation_dropped",
        ((ROUTER, "chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scaling", "chosen * scaling"),),
        GATE_TESTS,
    ),
    Fault(
        "expert_bias_trained",
        (
            (
                "lumina_ft/models/moe.py",
                'self.register_buffer("expert_bias", torch.zeros(config.num_experts, dtype=torch.float32))',
                "self.expert_bias = nn.Parameter(torch.zeros(config.num_experts))",
            ),
            (ROUTER, "chosen = scores.gather(-1, topk_idx)", "chosen = biased.gather(-1, topk_idx)"),
            (ROUTER, "with torch.no_grad():", "with torch.enable_grad():"),
        ),
        ("tests/unit/models/test_u2_model.py::test_m4_expert_bias_is_no_parameter_and_can_be_switched_off",),
    ),
    Fault(
        "rotary_on_all_dims",
        (
            (
                "lumina_ft/models/u2_backbone.py",
                "rotary_dim=self.config.rotary_dim",
                "rotary_dim=self.config.head_dim",
            ),
        ),
        BACKBONE_TESTS,
    ),
    Fault(
        "norm_after_rotary",
        (
            (
                ATTENTION,
                "q = rotate(self.query_layernorm(q), rotary)",
                "q = self.query_layernorm(rotate(q, rotary))",
            ),
            (ATTENTION, "k = rotate(self.key_layernorm(k), rotary)", "k = self.key_layernorm(rotate(k, rotary))"),
        ),
        BACKBONE_TESTS,
    ),
    Fault(
        "qkv_split_order",
        ((ATTENTION, "q, k, v = fused.split(", "q, v, k = fused.split("),),
        BACKBONE_TESTS,
    ),
    Fault(
        "kv_repeat_order",
        (
            (
                SEGMENTED,
                "out = F.scaled_dot_product_attention(",
                "k_nHLD, v_nHLD = (x.repeat(1, q.shape[1] // k.shape[1], 1, 1) for x in (k_nHLD, v_nHLD))\n"
                "    out = F.scaled_dot_product_attention(",
            ),
        ),
        BACKBONE_TESTS,
    ),
    Fault(
        "newline_rows_supervised",
        (("lumina_ft/data/layout.py", "supervisable=is_code)", "supervisable=True)"),),
        ("tests/unit/data/test_layout.py",),
    ),
    Fault("ar_head_not_causal", ((HEADS, "is_causal=True", "is_causal=False"),), FORWARD_TESTS),
    Fault(
        "ar_head_sees_its_own_code",
        (("lumina_ft/models/u2.py", "code_embeddings(codes[:, :-1])", "code_embeddings(codes[:, 1:])"),),
        FORWARD_TESTS,
    ),
    Fault(
        "final_scale_shift_swapped",
        ((HEADS, "scale, shift = self.adaLN_modulation", "shift, scale = self.adaLN_modulation"),),
        FORWARD_TESTS,
    ),
    Fault(
        "clean_query_sees_noisy_key",
        ((ATTENTION_RULE, "(_NO, _NO, _NO, _UP_TO, _UP_TO, _NO)", "(_UP_TO, _NO, _NO, _UP_TO, _UP_TO, _NO)"),),
        MASK_TESTS,
    ),
    Fault(
        "noisy_text_sees_its_clean_block",
        ((ATTENTION_RULE, "(SAME, _UP_TO, _NO, BEFORE, _NO, _NO)", "(SAME, _UP_TO, _NO, _UP_TO, _NO, _NO)"),),
        MASK_TESTS,
    ),
    Fault(
        "tail_leak_dense",
        (
            (
                ATTENTION_RULE,
                "allowed = meta.valid.unsqueeze(-1) & meta.valid.unsqueeze(-2)",
                "allowed = meta.valid.unsqueeze(-1) & torch.ones_like(meta.valid).unsqueeze(-2)",
            ),
            (
                ATTENTION_RULE,
                "sample = torch.searchsorted(cu_seqlens[1:].to(index), index, right=True)",
                "sample = torch.searchsorted(cu_seqlens[1:-1].to(index), index, right=True)",
            ),
        ),
        MASK_TESTS,
    ),
    Fault(
        "padding_leak_segmented", ((SEGMENTED, "ok & real, has_metadata", "ok | ~real, has_metadata"),), BACKBONE_TESTS
    ),
    Fault(
        "text_label_from_column_1",
        (
            (
                "lumina_ft/models/losses.py",
                "inputs.valid & (flat[:, 0] != IGNORE)",
                "inputs.valid & (flat[:, -1] != IGNORE)",
            ),
        ),
        ("tests/parity/test_corner.py",),
    ),
    Fault(
        "mean_of_means",
        (
            (
                "lumina_ft/train/loop.py",
                "*totals_by_term, stop_votes = world.sum(shares.to(world.device)).tolist()",
                "*totals_by_term, stop_votes = (shares * world.size).tolist()",
            ),
        ),
        ("tests/dist/test_runs.py::test_one_rank_sees_the_same_packs_as_two",),
    ),
    Fault(
        "noise_ignores_the_seed",
        (("lumina_ft/data/draws.py", "key = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)", "key = (0, 0)"),),
        ("tests/unit/data/test_noise.py",),
    ),
    Fault(
        "expert_lora_unmarked",
        (
            (
                EXPERTS,
                "if self.expert_parallel is not None:",
                'if self.expert_parallel is not None and "lora" not in name:',
            ),
        ),
        SHARED_EXPERTS_TESTS,
    ),
    Fault(
        "expert_lora_a_rank_major",
        ((EXPERT_LAYOUT, "return a.reshape(-1, a.shape[2])", "return a.transpose(0, 1).reshape(-1, a.shape[2])"),),
        EXPERT_ADAPTER_TESTS,
    ),
    Fault(
        "expert_lora_b_expert_major",
        ((EXPERT_LAYOUT, "return b.permute(1, 2, 0).reshape", "return b.permute(1, 0, 2).reshape"),),
        EXPERT_ADAPTER_TESTS,
    ),
    Fault(
        "experts_moved_by_one",
        ((ZERO3, "value[experts.local(value.shape[0])]", "value.roll(1, 0)[experts.local(value.shape[0])]"),),
        SHARED_EXPERTS_TESTS,
    ),
    Fault(
        "bias_cast_by_zero_init",
        ((ZERO3, "dtype=dtype, tensor_overrides=[])", "dtype=dtype)"),),
        SHARED_EXPERTS_TESTS,
    ),
    Fault(
        "exchange_splits_transposed",
        (
            (
                EXPERT_PARALLEL,
                "return _all_to_all(rows, send, receive, experts)",
                "return _all_to_all(rows, receive, send, experts)",
            ),
        ),
        SHARED_EXPERTS_TESTS,
    ),
    Fault(
        "expert_gradients_averaged_over_replicas",
        ((EXPERT_PARALLEL, '"autoep_expert"', '"replicated"'),),
        SHARED_EXPERTS_TESTS,
    ),
    Fault(
        "expert_gradients_averaged_over_all_ranks",
        ((EXPERT_PARALLEL, "marked.allreduce = False", "marked.allreduce = True"),),
        SHARED_EXPERTS_TESTS,
    ),
    Fault(
        "tile_mask_off_by_one_block",
        (
            (
                TILE_KERNEL,
                "(block_k >= block_q).to(tl.int32) + (block_k > block_q).to(tl.int32)",
                "(block_k > block_q).to(tl.int32) + (block_k > block_q + 1).to(tl.int32)",
            ),
        ),
        TILE_TESTS,
    ),
    Fault(
        "tile_kv_head_mapping",
        (
            (
                TILE_KERNEL,
                'see `tile_plan`.\n    """\n    head = tl.program_id(0) % (HEADS // PACK) * PACK\n'
                "    key_head = head // (HEADS // KEY_HEADS)",
                'see `tile_plan`.\n    """\n    head = tl.program_id(0) % (HEADS // PACK) * PACK\n'
                "    key_head = head % KEY_HEADS",
            ),
        ),
        TILE_TESTS,
    ),
    Fault(
        "tile_kv_head_mapping_in_backward",
        ((TILE_KERNEL, "head = key_head * group + at % group", "head = at % group * KEY_HEADS + key_head"),),
        TILE_TESTS,
    ),
    Fault(
        "tile_lse_correction_dropped",
        ((TILE_KERNEL, "value, acc * shrink[:, None], input_precision", "value, acc, input_precision"),),
        TILE_TESTS,
    ),
    Fault(
        "tile_lse_without_sum",
        ((TILE_KERNEL, "peak + tl.math.log2(divisor)", "peak"),),
        TILE_TESTS,
    ),
    Fault(
        "tile_ragged_tail_unmasked",
        ((TILE_KERNEL, " inside = rows < tl.load(entries + 2 * at + 1)", " inside = rows >= 0"),),
        TILE_TESTS,
    ),
    Fault(
        "tile_padding_rows_leak",
        (
            (
                "lumina_ft/kernels/attention/tile_plan.py",
                "valid=usable.astype(bool) & _inside(",
                "valid=_inside(",
            ),
        ),
        TILE_TESTS,
    ),
    Fault(
        "tile_offset_overflows_int32",
        ((TILE_KERNEL, "first.to(tl.int64) * stride", "first * stride"),),
        FAR_TESTS,
    ),
    Fault(
        "expert_offset_overflows_int32",
        ((EXPERT_KERNEL, "base = expert.to(tl.int64) * WIDTH * HIDDEN", "base = expert * WIDTH * HIDDEN"),),
        FAR_EXPERT_TESTS,
    ),
    Fault(
        "expert_rows_ragged_tail_unmasked",
        (
            (
                "lumina_ft/kernels/moe/kernel_backward.py",
                "live = rows < end\n        left_rows",
                "live = rows < end + (expert == 0).to(tl.int32)\n        left_rows",
            ),
        ),
        FUSED_TESTS,
    ),
    Fault(
        "expert_lora_scale_missing_in_backward",
        (
            (
                "lumina_ft/kernels/moe/fused_forward.py",
                "out, effective_scale(lora, rows.keys))",
                "out, 1.0 if backward else effective_scale(lora, rows.keys))",
            ),
        ),
        FUSED_LORA_TESTS,
    ),
    Fault(
        "routing_weight_gradient_missing",
        (
            (
                "lumina_ft/kernels/moe/fused_backward.py",
                "None if parts is None else parts.sum(0)",
                "None if parts is None else parts.sum(0) * 0",
            ),
        ),
        FUSED_TESTS,
    ),
)
