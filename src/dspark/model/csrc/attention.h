// Paged attention for blocks of query lanes: (row, query head) pairs of one sequence that share a key-value head.
// A lane's bits must never depend on the other lanes, nor on keys that it cannot see.
//
// One lane is one element of a vector register, so a sum over keys or over the head's elements never crosses lanes.
// Keys are taken in chunks of kChunk positions at fixed places (a multiple of kChunk on), with an online softmax in
// base 2. A chunk that a lane cannot see scales its sums by 1 and adds 0 to them, which changes no bit.
#pragma once

#include <algorithm>
#include <cstddef>

#include "ops.h"

namespace dspark {

constexpr int kChunk = 32;
constexpr float kNothingSeen = -1e30f;

// One layer of one pass. q (T, q_stride): rotated and multiplied by scale * log2(e). out (T, out_stride).
// keys, values (num_pages, page_size, num_kv_heads, head_dim), bfloat16 or float32.
struct AttentionLayer {
    const float* q;
    int64_t q_stride;
    float* out;
    int64_t out_stride;
    const void* keys;
    const void* values;
    bool is_bf16;
    int page_size, num_kv_heads, group_size, head_dim, window;
};

// Lanes begin .. end - 1 of a sequence, lane = row * group_size + head; rows count from `first_row` of the pass.
struct LaneBlock {
    const int32_t* table;
    const int32_t* positions;  // of the pass
    const int32_t* reach;      // of the pass: the last position that a row sees
    int first_row, kv_head, begin, end;
};

inline size_t attention_floats(int head_dim) {  // per thread
    const int width = int(round_up(head_dim, 8));
    return size_t(2 * kLanes * width + kChunk * kLanes + kChunk * width);
}

// Element offset of a position's vector for the block's key-value head.
inline int64_t cache_offset(const AttentionLayer& layer, const LaneBlock& block, int position) {
    const int64_t page = block.table[position / layer.page_size];
    const int64_t slot = page * layer.page_size + position % layer.page_size;
    return (slot * layer.num_kv_heads + block.kv_head) * layer.head_dim;
}

// Positions first .. first + count - 1 as float32 into out (count rounded up to 8, width): zeros past the end.
inline void gather_chunk(const AttentionLayer& layer, const LaneBlock& block, const void* cache, int first, int count,
                         int width, float* out) {
    const int dim = layer.head_dim;
    for (int i = 0; i < count; ++i, out += width) {
        const int64_t offset = cache_offset(layer, block, first + i);
        if (layer.is_bf16) {
            const uint16_t* source = static_cast<const uint16_t*>(cache) + offset;
            for (int e = 0; e < dim; ++e) out[e] = from_bf16(source[e]);
        } else {
            std::memcpy(out, static_cast<const float*>(cache) + offset, size_t(dim) * 4);
        }
        for (int e = dim; e < width; ++e) out[e] = 0.0f;
    }
    std::memset(out, 0, (round_up(count, 8) - count) * width * 4);
}

// scores (count rounded up to 8, lanes) = keys (.., width) . queries (width, lanes)
inline void score_chunk(const float* keys, const float* queries, int count, int width, float* scores) {
    for (int i = 0; i < count; i += 8) {
        Vec sum[8] = {};
        const float* row = keys + int64_t(i) * width;
        for (int e = 0; e < width; ++e) {
            const Vec q = load(queries + e * kLanes);
            for (int j = 0; j < 8; ++j) sum[j] += q * row[j * width + e];
        }
        for (int j = 0; j < 8; ++j) store(scores + (i + j) * kLanes, sum[j]);
    }
}

// Visible positions of the lanes of a block: first .. last of any, common_first .. common_last of all.
struct LaneSpan {
    int first, last, common_first, common_last;
};

// What each lane may see, and its softmax so far.
struct Softmax {
    IntVec first = IntVec{} + 1, last = IntVec{};  // visible positions, both inclusive; unused lanes see none
    Vec peak = splat(kNothingSeen);
    Vec total = {};
    LaneSpan span = {INT32_MAX, -1, 0, INT32_MAX};

    void limit(int lane, int position, int reach, int window) {
        const int from = window && position >= window ? position - window + 1 : 0;
        first[lane] = from;
        last[lane] = reach;
        span = {std::min(span.first, from), std::max(span.last, reach), std::max(span.common_first, from),
                std::min(span.common_last, reach)};
    }

    // Scores of positions from `position` on become probabilities; returns what earlier sums must be scaled by.
    Vec update(float* scores, int position, int count) {
        const bool all_see = position >= span.common_first && position + count - 1 <= span.common_last;
        return all_see ? update_as<false>(scores, position, count) : update_as<true>(scores, position, count);
    }

    template <bool masked>
    Vec update_as(float* scores, int position, int count) {
        Vec highest = peak;
        for (int i = 0; i < count; ++i) {
            Vec score = load(scores + i * kLanes);
            if (masked) {
                const IntVec here = IntVec{} + (position + i);
                score = (here >= first) & (here <= last) ? score : splat(-3e38f);
                store(scores + i * kLanes, score);
            }
            highest = maximum(highest, score);
        }
        const Vec scale = exp2_of(peak - highest);
        Vec sum = {};
        for (int i = 0; i < count; ++i) {
            const Vec probability = exp2_of(load(scores + i * kLanes) - highest);
            store(scores + i * kLanes, probability);
            sum += probability;
        }
        total = total * scale + sum;
        peak = highest;
        return scale;
    }
};

// sums (width, lanes) = sums * scale + values (count, width)^T . probabilities (count, lanes)
inline void add_values(const float* values, const float* probabilities, int count, int width, Vec scale, float* sums) {
    for (int e = 0; e < width; e += 8) {
        Vec sum[8];
        for (int j = 0; j < 8; ++j) sum[j] = load(sums + (e + j) * kLanes) * scale;
        for (int i = 0; i < count; ++i) {
            const Vec p = load(probabilities + i * kLanes);
            const float* row = values + int64_t(i) * width + e;
            for (int j = 0; j < 8; ++j) sum[j] += p * row[j];
        }
        for (int j = 0; j < 8; ++j) store(sums + (e + j) * kLanes, sum[j]);
    }
}

inline void limit_lanes(const AttentionLayer& layer, const LaneBlock& block, Softmax& softmax) {
    for (int lane = block.begin; lane < block.end; ++lane) {
        const int row = block.first_row + lane / layer.group_size;
        softmax.limit(lane - block.begin, block.positions[row], block.reach[row], layer.window);
    }
}

// The lane's query head among all of its row.
inline int lane_head(const AttentionLayer& layer, const LaneBlock& block, int lane) {
    return block.kv_head * layer.group_size + lane % layer.group_size;
}

inline const float* lane_query(const AttentionLayer& layer, const LaneBlock& block, int lane) {
    const int row = block.first_row + lane / layer.group_size;
    return layer.q + row * layer.q_stride + lane_head(layer, block, lane) * layer.head_dim;
}

inline float* lane_out(const AttentionLayer& layer, const LaneBlock& block, int lane) {
    const int row = block.first_row + lane / layer.group_size;
    return layer.out + row * layer.out_stride + lane_head(layer, block, lane) * layer.head_dim;
}

// At most kLanes lanes. scratch: attention_floats(head_dim) floats.
inline void attend(const AttentionLayer& layer, const LaneBlock& block, float* scratch) {
    const int dim = layer.head_dim, width = int(round_up(dim, 8)), num_lanes = block.end - block.begin;
    float* queries = scratch;
    float* sums = queries + width * kLanes;
    float* scores = sums + width * kLanes;
    float* gathered = scores + kChunk * kLanes;
    std::memset(scratch, 0, size_t(2 * width) * kLanes * 4);
    for (int lane = 0; lane < num_lanes; ++lane) {
        const float* q = lane_query(layer, block, block.begin + lane);
        for (int e = 0; e < dim; ++e) queries[e * kLanes + lane] = q[e];
    }
    Softmax softmax;
    limit_lanes(layer, block, softmax);
    const LaneSpan span = softmax.span;
    for (int chunk = span.first / kChunk * kChunk; chunk <= span.last; chunk += kChunk) {
        const int begin = chunk > span.first ? chunk : span.first;
        const int end = chunk + kChunk <= span.last ? chunk + kChunk : span.last + 1;
        gather_chunk(layer, block, layer.keys, begin, end - begin, width, gathered);
        score_chunk(gathered, queries, end - begin, width, scores);
        const Vec scale = softmax.update(scores, begin, end - begin);
        gather_chunk(layer, block, layer.values, begin, end - begin, width, gathered);
        add_values(gathered, scores, end - begin, width, scale, sums);
    }
    const Vec inverse = 1.0f / softmax.total;
    for (int lane = 0; lane < num_lanes; ++lane) {
        float* out = lane_out(layer, block, block.begin + lane);
        for (int e = 0; e < dim; ++e) out[e] = sums[e * kLanes + lane] * inverse[lane];
    }
}

}  // namespace dspark
