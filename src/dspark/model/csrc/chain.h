// Chain: the sequential part of a block drafter, for greedy rows: a low-rank bias on given logits, then the likeliest
// token, position after position (DSpark, equations 5 to 7).
// It must never look at a position before the token in front of it is chosen.
//
// Shapes: R rows, B positions, W draft vocabulary, D hidden, K rank.
#pragma once

#include <omp.h>

#include <vector>

#include "team.h"
#include "workspace.h"

namespace dspark {

enum ChainKind { kVanilla = 0, kGated = 1, kRecurrent = 2 };

struct ChainArgs {
    const float* first;        // (V, K): W1
    LinearArgs second;         // (W, K): W2
    const float* gate;         // gated (K, D + K), recurrent (3 K, 2 K + D), row by row; null: vanilla
    const float* gate_bias;    // (K) or (3 K)
    const float* sure;         // (D + K) weights of the confidence, or (D) without the embedding; null: none
    const int32_t* words;      // (W) target id of each draft token
    float sure_bias;
    int32_t kind, rank, hidden, num_words, sure_with_rank, num_threads;
};

struct ChainBatch {
    const float *logits, *hidden;      // (R, B, W), (R, B, D)
    const int32_t *anchors, *limits;   // (R): the token before the first position; positions wanted
    int32_t* tokens;                   // (R, B) target ids
    float* confidence;                 // (R, B) logits
    int32_t num_rows, block;
};

struct Chain {
    explicit Chain(const ChainArgs& given) : args(given), second(view_of(given.second)) {}
    ChainArgs args;
    Linear second;
    Buffer memory;
};

// Where everything of one run lies.
struct ChainSpace {
    float *state, *latent, *bias, *best, *work;  // (R, K), (R, K), (R, W), (R, threads), per thread 3 K
    int32_t *where, *previous;                   // (R, threads), (R)
    char* prepared;                              // rows of the second factor's input
    uint8_t* scratch;
    size_t prepared_stride, scratch_bytes;
};

inline ChainSpace carve(const Chain& chain, int64_t rows, int num_threads, Carver& pieces) {
    const ChainArgs& args = chain.args;
    ChainSpace space{};
    space.state = pieces.floats(rows * args.rank);
    space.latent = pieces.floats(rows * args.rank);
    space.bias = pieces.floats(rows * args.num_words);
    space.best = pieces.floats(rows * num_threads);
    space.work = pieces.floats(int64_t(num_threads) * 3 * args.rank);
    space.where = reinterpret_cast<int32_t*>(pieces.take(size_t(rows) * num_threads * 4));
    space.previous = reinterpret_cast<int32_t*>(pieces.take(size_t(rows) * 4));
    if (args.rank) {
        space.prepared_stride = prepared_bytes(chain.second.kind, args.rank);
        space.prepared = pieces.take(size_t(rows) * space.prepared_stride);
        space.scratch_bytes = align(scratch_bytes(chain.second.kind, args.rank, int(rows))) + 64;
        space.scratch = reinterpret_cast<uint8_t*>(pieces.take(space.scratch_bytes * num_threads));
    }
    return space;
}

inline float dot(const float* a, const float* b, int count) {
    Vec sums = {};
    int i = 0;
    for (; i + kLanes <= count; i += kLanes) sums += load(a + i) * load(b + i);
    float sum = 0.0f;
    for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
    for (; i < count; ++i) sum += a[i] * b[i];
    return sum;
}

constexpr int64_t kStretch = 512;  // tokens whose maximum is found before the place of it is looked for

// One thread's view. Rows advance together; a thread's own rows need no waiting between their positions.
class ChainPass {
   public:
    ChainPass(const Chain& chain, const ChainBatch& batch, const ChainSpace& space, Barrier& barrier)
        : chain_(chain), args_(chain.args), batch_(batch), space_(space), barrier_(barrier),
          tid_(omp_get_thread_num()), num_threads_(omp_get_num_threads()) {}

    void run() {
        int longest = 0;
        for (int r = 0; r < batch_.num_rows; ++r) longest = std::max(longest, int(batch_.limits[r]));
        const Range range = mine(batch_.num_rows);
        for (int64_t r = range.begin; r < range.end; ++r) {
            space_.previous[r] = batch_.anchors[r];
            std::fill(space_.state + r * args_.rank, space_.state + (r + 1) * args_.rank, 0.0f);
        }
        for (int j = 0; j < longest; ++j) {
            for (int64_t r = range.begin; r < range.end; ++r) prepare(r, j);
            meet();
            if (args_.rank)
                dspark::run(chain_.second, space_.prepared, batch_.num_rows, space_.bias, args_.num_words, false, tid_,
                            num_threads_, space_.scratch + tid_ * space_.scratch_bytes);
            meet();
            for (int r = 0; r < batch_.num_rows; ++r) search(r, j);
            meet();
            for (int64_t r = range.begin; r < range.end; ++r) choose(r, j);
        }
    }

   private:
    void meet() { barrier_.wait(num_threads_); }
    Range mine(int64_t count) const { return share(count, tid_, num_threads_); }
    const float* hidden(int64_t r, int j) const { return batch_.hidden + (r * batch_.block + j) * args_.hidden; }

    // Confidence and latent of row r at position j, from the token before it.
    void prepare(int64_t r, int j) {
        const int rank = args_.rank, width = args_.hidden;
        const float* embedded = args_.first + int64_t(space_.previous[r]) * rank;
        const float* h = hidden(r, j);
        if (args_.sure) {
            float sure = args_.sure_bias + dot(args_.sure, h, width);
            if (args_.sure_with_rank) sure += dot(args_.sure + width, embedded, rank);
            batch_.confidence[r * batch_.block + j] = sure;
        }
        if (!rank) return;
        float* latent = space_.latent + r * rank;
        if (args_.kind == kVanilla)
            std::memcpy(latent, embedded, size_t(rank) * 4);
        else if (args_.kind == kGated)
            gate(h, embedded, latent);
        else
            recur(h, embedded, space_.state + r * rank, latent);
        prepare_row(chain_.second, latent, space_.prepared + r * space_.prepared_stride);
    }

    void gate(const float* h, const float* embedded, float* latent) {
        const int rank = args_.rank, width = args_.hidden;
        for (int i = 0; i < rank; ++i) {
            const float* row = args_.gate + int64_t(i) * (width + rank);
            const float sum = args_.gate_bias[i] + dot(row, h, width) + dot(row + width, embedded, rank);
            latent[i] = embedded[i] / (1.0f + std::exp(-sum));
        }
    }

    void recur(const float* h, const float* embedded, float* state, float* latent) {
        const int rank = args_.rank, width = args_.hidden;
        float* sums = space_.work + int64_t(tid_) * 3 * rank;
        for (int i = 0; i < 3 * rank; ++i) {
            const float* row = args_.gate + int64_t(i) * (2 * rank + width);
            sums[i] = args_.gate_bias[i] + dot(row, state, rank) + dot(row + rank, embedded, rank) +
                      dot(row + 2 * rank, h, width);
        }
        for (int i = 0; i < rank; ++i) {
            const float keep = 1.0f / (1.0f + std::exp(-sums[i]));
            state[i] = keep * state[i] + (1.0f - keep) * std::tanh(sums[rank + i]);
            latent[i] = std::tanh(sums[2 * rank + i]);
        }
    }

    // This thread's share of the vocabulary: the first of its likeliest tokens.
    void search(int r, int j) {
        const Range range = mine(args_.num_words);
        const float* base = batch_.logits + (int64_t(r) * batch_.block + j) * args_.num_words;
        const float* bias = space_.bias + int64_t(r) * args_.num_words;
        float best = -INFINITY;
        int64_t at = range.begin;  // start of the stretch that holds the best; then its place
        for (int64_t start = range.begin; start < range.end; start += kStretch) {
            const float top = highest(base, bias, start, std::min(start + kStretch, range.end));
            if (top > best) best = top, at = start;
        }
        while (at + 1 < range.end && !(score(base, bias, at) == best)) ++at;
        space_.best[r * num_threads_ + tid_] = best;
        space_.where[r * num_threads_ + tid_] = int32_t(at);
    }
    float highest(const float* base, const float* bias, int64_t start, int64_t end) const {
        Vec tops = splat(-INFINITY);
        int64_t w = start;
        for (; w + kLanes <= end; w += kLanes)
            tops = maximum(tops, args_.rank ? load(base + w) + load(bias + w) : load(base + w));
        float top = -INFINITY;
        for (int lane = 0; lane < kLanes; ++lane) top = std::max(top, tops[lane]);
        for (; w < end; ++w) top = std::max(top, score(base, bias, w));
        return top;
    }
    float score(const float* base, const float* bias, int64_t w) const {
        return args_.rank ? base[w] + bias[w] : base[w];
    }

    void choose(int64_t r, int j) {
        int t = 0;
        for (int i = 1; i < num_threads_; ++i)
            if (space_.best[r * num_threads_ + i] > space_.best[r * num_threads_ + t]) t = i;
        space_.previous[r] = args_.words[space_.where[r * num_threads_ + t]];
        batch_.tokens[r * batch_.block + j] = space_.previous[r];
    }

    const Chain& chain_;
    const ChainArgs& args_;
    const ChainBatch& batch_;
    const ChainSpace& space_;
    Barrier& barrier_;
    const int tid_, num_threads_;
};

inline void run_chain(Chain& chain, const ChainBatch& batch) {
    const int num_threads = chain.args.num_threads;
    Carver sizes(nullptr);
    carve(chain, batch.num_rows, num_threads, sizes);
    Carver pieces(static_cast<char*>(chain.memory.at_least(sizes.used())));
    const ChainSpace space = carve(chain, batch.num_rows, num_threads, pieces);
    Barrier barrier;
#pragma omp parallel num_threads(num_threads)
    ChainPass(chain, batch, space, barrier).run();
}

}  // namespace dspark

extern "C" void* dspark_chain_create(const dspark::ChainArgs* args) {
    try {
        return new dspark::Chain(*args);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

extern "C" void dspark_chain_destroy(void* chain) { delete static_cast<dspark::Chain*>(chain); }

// 0, or a Status. Not for two threads at once on one chain.
extern "C" int dspark_chain_run(void* chain, const dspark::ChainBatch* batch) {
    try {
        dspark::run_chain(*static_cast<dspark::Chain*>(chain), *batch);
        return dspark::kOk;
    } catch (const std::bad_alloc&) {
        return dspark::kNoMemory;
    }
}
