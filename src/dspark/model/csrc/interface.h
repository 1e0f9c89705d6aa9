// What Python hands over: a model once, a batch for every pass. native.py declares the same fields.
// Nothing here owns what it points to.
//
// Shapes: T rows of the pass, D hidden, H heads, G key-value heads, E head_dim, V vocabulary, R rows that want logits,
// S sequences.
#pragma once

#include <cstdint>

namespace dspark {

struct LinearArgs {
    int32_t kind, n, k, unused;
    const void* blob;
    const float* bias;
};

struct LayerArgs {
    const float *attn_norm, *q_norm, *k_norm, *post_attn_norm, *mlp_norm, *post_mlp_norm;  // null: absent
    LinearArgs qkv, o, gate_up, down;
    int32_t window, rope;
};

struct ModelArgs {
    const LayerArgs* layers;
    const void* embed;  // (V, D) bfloat16 or float32
    const float* norm;
    const float* const* rope_cos;  // each (max_context, E)
    const float* const* rope_sin;
    LinearArgs head;
    int32_t num_layers, hidden, num_heads, num_kv_heads, head_dim, intermediate, activation;
    int32_t embed_is_bf16, cache_is_bf16, max_context, num_threads, num_embeddings;
    float eps, attn_scale, embed_scale, logit_softcap;
};

struct BatchArgs {
    const int32_t *tokens, *positions, *row_starts, *logit_rows;
    const int32_t* const* tables;  // per cache group (S, table_widths[group])
    const int32_t* const* slots;   // per cache group (T,)
    const int32_t* table_widths;
    const int32_t* group_of;  // cache group of each layer
    void* const* keys;        // per layer (num_pages, page_size, G, E)
    void* const* values;
    float* const* taps;  // num_layers + 1 pointers to (T, D), null where nobody asked
    const float* inputs;   // (T, D) in place of the tokens' embeddings, or null
    const int32_t* reach;  // (T,) the last position that each row sees, or null: its own
    float* logits;       // (R, V)
    int32_t num_tokens, num_sequences, num_logits, page_size;
};

enum Status { kOk = 0, kNoMemory = 1, kBadToken = 2, kBadPosition = 3 };

}  // namespace dspark
