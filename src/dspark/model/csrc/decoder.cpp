// The doors of the native decoder: a whole forward pass in one parallel region.
// It must never run two passes of one model at once; the caller takes turns.

#include "chain.h"
#include "linear_c.h"
#include "pass.h"

namespace dspark {

inline Status check(const ModelArgs& args, const BatchArgs& batch) {
    for (int i = 0; i < batch.num_tokens; ++i) {
        if (!batch.inputs && uint32_t(batch.tokens[i]) >= uint32_t(args.num_embeddings)) return kBadToken;
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
