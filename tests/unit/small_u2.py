"""The smallest model that has every part: dense and MoE layers, image tables, codebook head."""

from lumina_ft.models.u2_config import U2Config


def small_config(**overrides: object) -> U2Config:
    sizes = dict(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=2,
        num_codebooks=3,
        image_embedding_rows=20,
        image_head_classes=8,
        ar_head_depth=1,
        ar_head_heads=2,
        pad_token_id=39,
    )
    return U2Config(**{**sizes, **overrides})
