// The whole forward pass of a decoder in one parallel region, on a processor.
// It must never let a row's bits depend on the rows around it, nor on the number of threads.
//
// Shapes: T rows of the pass, D hidden, H heads, G key-value heads, E head_dim, F intermediate, V vocabulary,
// R rows that want logits. Everything between linears is float32; a linear's input is prepared row by row.

#include <omp.h>
#include <sys/mman.h>

#include <new>
#include <vector>

#include "attention.h"
#include "attention_amx.h"
#include "linear_c.h"
#include "ops.h"
#include "team.h"

namespace dspark {

// -- what Python hands over; native.py declares the same fields

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
    float* logits;       // (R, V)
    int32_t num_tokens, num_sequences, num_logits, page_size;
};

enum Status { kOk = 0, kNoMemory = 1, kBadToken = 2, kBadPosition = 3 };

constexpr int kPrivateFloats = 4096;  // below this, every thread prepares all rows for itself rather than wait
constexpr int kPrivateRows = 8;
constexpr int kMlpRows = 256;  // rows whose intermediate activations are alive at once

// Memory that grows and is never copied; huge pages, as passes walk over it from end to end.
class Buffer {
   public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { release(); }

    void* at_least(size_t bytes) {
        if (bytes <= size_) return data_;
        release();
        const size_t size = (bytes + bytes / 4 + (1 << 21)) >> 21 << 21;
        void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (data == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
        madvise(data, size, MADV_HUGEPAGE);
#endif
        data_ = data;
        size_ = size;
        return data_;
    }

   private:
    void release() {
        if (data_) munmap(data_, size_);
        data_ = nullptr;
        size_ = 0;
    }
    void* data_ = nullptr;
    size_t size_ = 0;
};

struct Layer {
    LayerArgs args;
    Linear qkv, o, gate_up, down;
};

inline Linear view_of(const LinearArgs& args) { return view(args.kind, args.n, args.k, args.blob, args.bias); }

struct Model {
    explicit Model(const ModelArgs& given) : args(given), head(view_of(given.head)) {
        for (int i = 0; i < args.num_layers; ++i) {
            const LayerArgs& layer = args.layers[i];
            layers.push_back({layer, view_of(layer.qkv), view_of(layer.o), view_of(layer.gate_up), view_of(layer.down)});
        }
        cos.assign(args.rope_cos, args.rope_cos + args_num_ropes());
        sin.assign(args.rope_sin, args.rope_sin + args_num_ropes());
    }

    int args_num_ropes() const {
        int count = 0;
        for (const Layer& layer : layers) count = std::max(count, layer.args.rope + 1);
        return count;
    }

    ModelArgs args;
    std::vector<Layer> layers;
    Linear head;
    std::vector<const float*> cos, sin;
    Buffer memory;
};

struct Item {
    int32_t sequence, begin, end;  // lanes of one sequence, for each key-value head
};

// Where everything of one pass lies.
struct Workspace {
    float *x, *qkv, *attended, *gate_up, *branch;  // (T, D), (T, (H + 2G) E), (T, H E), (rows, 2F), (T, D)
    char* prepared;                                // the widest linear input of all rows
    char* of_threads;                              // per thread: private prepared rows, floats, scratch
    size_t prepared_stride, private_bytes, float_bytes, scratch_bytes;

    char* private_rows(int tid) const { return of_threads + size_t(tid) * thread_bytes(); }
    float* floats(int tid) const { return reinterpret_cast<float*>(private_rows(tid) + private_bytes); }
    void* scratch(int tid) const { return private_rows(tid) + private_bytes + float_bytes; }
    size_t thread_bytes() const { return private_bytes + float_bytes + scratch_bytes; }
};

inline size_t align(size_t bytes) { return (bytes + 63) / 64 * 64; }

class Carver {  // gives out aligned pieces of one buffer; first run without a base to learn the size
   public:
    explicit Carver(char* base) : base_(base) {}
    char* take(size_t bytes) {
        char* piece = base_ + used_;
        used_ += align(bytes);
        return piece;
    }
    float* floats(int64_t count) { return reinterpret_cast<float*>(take(size_t(count) * 4)); }
    size_t used() const { return used_; }

   private:
    char* base_;
    size_t used_ = 0;
};

inline size_t attention_scratch(int head_dim) {
#if defined(DSPARK_AMX)
    return std::max(attention_floats(head_dim), tile_floats(head_dim));
#else
    return attention_floats(head_dim);
#endif
}

inline Workspace carve(const Model& model, int num_rows, int num_threads, Carver& carver) {
    const ModelArgs& args = model.args;
    Workspace space;
    size_t prepared = 0, scratch = 0;
    auto include = [&](const Linear& linear) {
        prepared = std::max(prepared, prepared_bytes(linear.kind, linear.k));
        scratch = std::max(scratch, scratch_bytes(linear.kind, linear.k, num_rows));
    };
    include(model.head);
    for (const Layer& layer : model.layers)
        for (const Linear* linear : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) include(*linear);
    const int64_t rows = num_rows, heads = int64_t(args.num_heads) * args.head_dim;
    space.x = carver.floats(rows * args.hidden);
    space.branch = carver.floats(rows * args.hidden);
    space.qkv = carver.floats(rows * (heads + 2 * int64_t(args.num_kv_heads) * args.head_dim));
    space.attended = carver.floats(rows * heads);
    space.gate_up = carver.floats(std::min<int64_t>(rows, kMlpRows) * 2 * args.intermediate);
    space.prepared = carver.take(rows * prepared);
    space.private_bytes = align(kPrivateRows * prepared);
    const size_t widest = size_t(std::max({args.hidden, args.intermediate, int(heads)}));
    space.float_bytes = align(std::max(widest, attention_scratch(args.head_dim)) * 4);
    space.scratch_bytes = align(scratch) + 64;
    space.of_threads = carver.take(space.thread_bytes() * num_threads);
    return space;
}

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
        for (int64_t row = range.begin; row < range.end; ++row) prepare_row(linear, fill(row, floats), out + row * stride);
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

inline Status check(const ModelArgs& args, const BatchArgs& batch) {
    for (int i = 0; i < batch.num_tokens; ++i) {
        if (uint32_t(batch.tokens[i]) >= uint32_t(args.num_embeddings)) return kBadToken;
        if (uint32_t(batch.positions[i]) >= uint32_t(args.max_context)) return kBadPosition;
    }
    return kOk;
}

// Lanes that one item may hold: what the kernel takes, but not so many that threads would have no work.
inline int lanes_of_items(const ModelArgs& args, const BatchArgs& batch) {
#if defined(DSPARK_AMX)
    if (can_use_tiles(args.head_dim, batch.page_size, args.cache_is_bf16)) {
        const int64_t num_blocks = int64_t(batch.num_tokens) * args.num_heads / kLanes;
        return kLanes * int(std::clamp<int64_t>(num_blocks / (8 * args.num_threads), 1, kMaxTileBlocks));
    }
#endif
    (void)args, (void)batch;
    return kLanes;
}

inline std::vector<Item> cut_into_items(const ModelArgs& args, const BatchArgs& batch) {
    std::vector<Item> items;
    const int step = lanes_of_items(args, batch);
    for (int s = 0; s < batch.num_sequences; ++s) {
        const int num_lanes = (batch.row_starts[s + 1] - batch.row_starts[s]) * (args.num_heads / args.num_kv_heads);
        for (int begin = 0; begin < num_lanes; begin += step)
            items.push_back({s, begin, std::min(begin + step, num_lanes)});
    }
    return items;
}

inline Status forward(Model& model, const BatchArgs& batch) {
    if (const Status status = check(model.args, batch)) return status;
    const int num_threads = model.args.num_threads;
    Carver sizes(nullptr);
    carve(model, batch.num_tokens, num_threads, sizes);
    Carver pieces(static_cast<char*>(model.memory.at_least(sizes.used())));
    const Workspace space = carve(model, batch.num_tokens, num_threads, pieces);
    const std::vector<Item> items = cut_into_items(model.args, batch);
    std::vector<std::atomic<int>> tickets(model.args.num_layers);
    Barrier barrier;
#pragma omp parallel num_threads(num_threads)
    Pass(model, batch, space, items, barrier, tickets.data()).run();
    return kOk;
}

}  // namespace dspark

extern "C" void* dspark_model_create(const dspark::ModelArgs* args) {
    try {
        return new dspark::Model(*args);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

extern "C" void dspark_model_destroy(void* model) { delete static_cast<dspark::Model*>(model); }

// 0, or a Status. Not for two threads at once on one model.
extern "C" int dspark_forward(void* model, const dspark::BatchArgs* batch) {
    try {
        return dspark::forward(*static_cast<dspark::Model*>(model), *batch);
    } catch (const std::bad_alloc&) {
        return dspark::kNoMemory;
    }
}
