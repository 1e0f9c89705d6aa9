// Pass: the steps of one forward pass as one thread of the team sees them.
// It must never let a row's bits depend on the rows around it, nor on the number of threads.
//
// Everything between linears is float32; a linear's input is prepared row by row.
// Shapes: T rows of the pass, D hidden, H heads, G key-value heads, E head_dim, F intermediate.
#pragma once

#include <omp.h>

#include <atomic>
#include <vector>

#include "team.h"
#include "workspace.h"

namespace dspark {

struct Item {
    int32_t sequence, begin, end;  // lanes of one sequence, for each key-value head
};

// One thread's view of one pass. Every method is called by all threads; `meet` is their barrier.
class Pass {
   public:
    Pass(const Model& model, const BatchArgs& batch, const Workspace& space, const std::vector<Item>& items,
         Barrier& barrier, std::atomic<int>* tickets)
        : model_(model), args_(model.args), batch_(batch), space_(space), items_(items), barrier_(barrier),
          tickets_(tickets), tid_(omp_get_thread_num()), num_threads_(omp_get_num_threads()) {}

    void run() {
        embed();
        for (int i = 0; i < args_.num_layers; ++i) {
            attention_half(i);
            mlp_half(model_.layers[i]);
        }
        finish();
    }

   private:
    void meet() { barrier_.wait(num_threads_); }
    Range mine(int64_t count) const { return share(count, tid_, num_threads_); }
    float* x(int64_t row) const { return space_.x + row * args_.hidden; }

    void embed() {
        const int width = args_.hidden;
        const Range range = mine(batch_.num_tokens);
        for (int64_t row = range.begin; row < range.end; ++row) {
            if (batch_.inputs) {
                std::memcpy(x(row), batch_.inputs + row * width, size_t(width) * 4);
                continue;
            }
            const int64_t offset = int64_t(batch_.tokens[row]) * width;
            const uint16_t* half = static_cast<const uint16_t*>(args_.embed) + offset;
            const float* full = static_cast<const float*>(args_.embed) + offset;
            float* out = x(row);
            for (int i = 0; i < width; ++i)
                out[i] = (args_.embed_is_bf16 ? from_bf16(half[i]) : full[i]) * args_.embed_scale;
        }
        meet();
    }

    // Prepared inputs of `linear` for rows 0 .. count - 1, where fill(row, floats) gives a row's floats (it may return
    // a row that lies elsewhere). Few small rows: each thread prepares all of them for itself, which saves a barrier.
    template <class Fill>
    const void* prepare(const Linear& linear, int64_t count, Fill fill) {
        const size_t stride = prepared_bytes(linear.kind, linear.k);
        const bool alone = num_threads_ == 1 || (count <= kPrivateRows && count * linear.k <= kPrivateFloats);
        char* out = alone && count <= kPrivateRows ? space_.private_rows(tid_) : space_.prepared;
        const Range range = alone ? Range{0, count} : mine(count);
        float* floats = space_.floats(tid_);
        for (int64_t row = range.begin; row < range.end; ++row)
            prepare_row(linear, fill(row, floats), out + row * stride);
        if (!alone) meet();
        return out;
    }

    void multiply(const Linear& linear, const void* prepared, int64_t count, float* out, int64_t ldo, bool accumulate) {
        dspark::run(linear, prepared, int(count), out, ldo, accumulate, tid_, num_threads_, space_.scratch(tid_));
        meet();
    }

    void copy_tap(int index) {
        float* tap = batch_.taps[index];
        if (!tap) return;
        const Range range = mine(int64_t(batch_.num_tokens) * args_.hidden);
        std::memcpy(tap + range.begin, space_.x + range.begin, size_t(range.end - range.begin) * 4);
    }

    // x += post_norm(linear(prepared)) for rows first .. first + count - 1; without a post norm in one step.
    void add_branch(const Linear& linear, const void* prepared, int64_t first, int64_t count, const float* post_norm) {
        const int width = args_.hidden;
        if (!post_norm) return multiply(linear, prepared, count, x(first), width, true);
        multiply(linear, prepared, count, space_.branch, width, false);
        const Range range = mine(count);
        for (int64_t row = range.begin; row < range.end; ++row) {
            float* branch = space_.branch + row * width;
            rms_norm(branch, post_norm, args_.eps, width, branch);
            float* target = x(first + row);
            for (int i = 0; i < width; ++i) target[i] += branch[i];
        }
        meet();
    }

    void attention_half(int index) {
        const Layer& layer = model_.layers[index];
        const int64_t count = batch_.num_tokens;
        const int64_t heads = int64_t(args_.num_heads) * args_.head_dim;
        copy_tap(index);
        const void* input = prepare(layer.qkv, count, [&](int64_t row, float* floats) {
            rms_norm(x(row), layer.args.attn_norm, args_.eps, args_.hidden, floats);
            return floats;
        });
        multiply(layer.qkv, input, count, space_.qkv, layer.qkv.n, false);
        place_heads(index);
        meet();
        attend_items(index);
        meet();
        input = prepare(layer.o, count, [&](int64_t row, float*) { return space_.attended + row * heads; });
        add_branch(layer.o, input, 0, count, layer.args.post_attn_norm);
    }

    // Query and key norms and rotations; keys and values into the cache.
    void place_heads(int index) {
        const LayerArgs& layer = model_.layers[index].args;
        const int num_heads = args_.num_heads, num_kv = args_.num_kv_heads, dim = args_.head_dim;
        const int per_row = num_heads + 2 * num_kv;
        const int32_t* slots = batch_.slots[batch_.group_of[index]];
        const float query_scale = args_.attn_scale * 1.44269504f;
        const Range range = mine(int64_t(batch_.num_tokens) * per_row);
        for (int64_t item = range.begin; item < range.end; ++item) {
            const int64_t row = item / per_row;
            const int head = int(item % per_row);
            float* vector = space_.qkv + item * dim;
            const bool is_query = head < num_heads, is_value = head >= num_heads + num_kv;
            if (!is_value) {
                const float* norm = is_query ? layer.q_norm : layer.k_norm;
                if (norm) rms_norm(vector, norm, args_.eps, dim, vector);
                const int64_t offset = int64_t(batch_.positions[row]) * dim;
                rotate(vector, model_.cos[layer.rope] + offset, model_.sin[layer.rope] + offset, dim);
            }
            if (is_query)
                for (int e = 0; e < dim; ++e) vector[e] *= query_scale;
            else
                write_cache(is_value ? batch_.values[index] : batch_.keys[index], vector,
                            (int64_t(slots[row]) * num_kv + (head - num_heads) % num_kv) * dim);
        }
    }

    void write_cache(void* cache, const float* vector, int64_t offset) const {
        const int dim = args_.head_dim;
        if (!args_.cache_is_bf16) {
            std::memcpy(static_cast<float*>(cache) + offset, vector, size_t(dim) * 4);
            return;
        }
        uint16_t* out = static_cast<uint16_t*>(cache) + offset;
        for (int e = 0; e < dim; ++e) out[e] = to_bf16(vector[e]);
    }

    void attend_items(int index) {
        const int num_kv = args_.num_kv_heads;
        AttentionLayer layer;
        layer.q = space_.qkv;
        layer.q_stride = int64_t(args_.num_heads + 2 * num_kv) * args_.head_dim;
        layer.out = space_.attended;
        layer.out_stride = int64_t(args_.num_heads) * args_.head_dim;
        layer.keys = batch_.keys[index];
        layer.values = batch_.values[index];
        layer.is_bf16 = args_.cache_is_bf16;
        layer.page_size = batch_.page_size;
        layer.num_kv_heads = num_kv;
        layer.group_size = args_.num_heads / num_kv;
        layer.head_dim = args_.head_dim;
        layer.window = model_.layers[index].args.window;
        if (!attend_items_with_tiles(index, layer))
            for_my_items(index, [&](const LaneBlock& block) { attend(layer, block, space_.floats(tid_)); });
    }

    bool attend_items_with_tiles(int index, const AttentionLayer& layer) {
#if defined(DSPARK_AMX)
        if (!can_use_tiles(layer.head_dim, layer.page_size, layer.is_bf16)) return false;
        const FullTiles tiles;
        for_my_items(index, [&](const LaneBlock& block) { attend_with_tiles(layer, block, space_.floats(tid_)); });
        return true;
#else
        (void)index, (void)layer;
        return false;
#endif
    }

    // Blocks of lanes go to whichever thread is free; the last ones of a prompt see most keys and go first.
    template <class Work>
    void for_my_items(int index, Work work) {
        const int num_kv = args_.num_kv_heads, group = batch_.group_of[index];
        const int total = int(items_.size()) * num_kv;
        for (int ticket = tickets_[index]++; ticket < total; ticket = tickets_[index]++) {
            const Item& item = items_[items_.size() - 1 - ticket / num_kv];
            LaneBlock block;
            block.table = batch_.tables[group] + int64_t(item.sequence) * batch_.table_widths[group];
            block.positions = batch_.positions;
            block.reach = batch_.reach ? batch_.reach : batch_.positions;
            block.first_row = batch_.row_starts[item.sequence];
            block.kv_head = ticket % num_kv;
            block.begin = item.begin;
            block.end = item.end;
            work(block);
        }
    }

    void mlp_half(const Layer& layer) {
        const int width = args_.intermediate;
        for (int64_t first = 0; first < batch_.num_tokens; first += kMlpRows) {
            const int64_t count = std::min<int64_t>(kMlpRows, batch_.num_tokens - first);
            const void* input = prepare(layer.gate_up, count, [&](int64_t row, float* floats) {
                rms_norm(x(first + row), layer.args.mlp_norm, args_.eps, args_.hidden, floats);
                return floats;
            });
            multiply(layer.gate_up, input, count, space_.gate_up, 2 * width, false);
            input = prepare(layer.down, count, [&](int64_t row, float* floats) {
                const float* gates = space_.gate_up + row * 2 * width;
                gate(args_.activation, gates, gates + width, width, floats);
                return floats;
            });
            add_branch(layer.down, input, first, count, layer.args.post_mlp_norm);
        }
    }

    void finish() {
        float* tap = batch_.taps[args_.num_layers];
        const Range range = tap ? mine(batch_.num_tokens) : Range{0, 0};
        for (int64_t row = range.begin; row < range.end; ++row)
            rms_norm(x(row), args_.norm, args_.eps, args_.hidden, tap + row * args_.hidden);
        if (!batch_.num_logits) return;
        const void* input = prepare(model_.head, batch_.num_logits, [&](int64_t row, float* floats) {
            rms_norm(x(batch_.logit_rows[row]), args_.norm, args_.eps, args_.hidden, floats);
            return floats;
        });
        const int64_t num_words = model_.head.n;
        multiply(model_.head, input, batch_.num_logits, batch_.logits, num_words, false);
        if (args_.logit_softcap == 0.0f) return;
        const Range all = mine(batch_.num_logits * num_words);
        const float cap = args_.logit_softcap;
        for (int64_t i = all.begin; i < all.end; ++i) batch_.logits[i] = cap * std::tanh(batch_.logits[i] / cap);
    }

    const Model& model_;
    const ModelArgs& args_;
    const BatchArgs& batch_;
    const Workspace& space_;
    const std::vector<Item>& items_;
    Barrier& barrier_;
    std::atomic<int>* tickets_;
    const int tid_, num_threads_;
};

}  // namespace dspark
