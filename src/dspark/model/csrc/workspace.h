// The model with its views of packed weights, and the memory in which a pass works.
// Memory grows with the largest pass and is never copied; a pass may assume nothing about what lies in it.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <vector>

#include "attention_amx.h"
#include "interface.h"

namespace dspark {

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
            layers.push_back(
                {layer, view_of(layer.qkv), view_of(layer.o), view_of(layer.gate_up), view_of(layer.down)});
        }
        int num_ropes = 0;
        for (const Layer& layer : layers) num_ropes = std::max(num_ropes, layer.args.rope + 1);
        cos.assign(args.rope_cos, args.rope_cos + num_ropes);
        sin.assign(args.rope_sin, args.rope_sin + num_ropes);
    }

    ModelArgs args;
    std::vector<Layer> layers;
    Linear head;
    std::vector<const float*> cos, sin;
    Buffer memory;
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

}  // namespace dspark
