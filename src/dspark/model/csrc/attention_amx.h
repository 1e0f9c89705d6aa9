// The same attention on AMX tiles, for a bfloat16 cache: blocks of 16 query lanes against 64 positions at a time.
// A lane's bits must never depend on the other lanes: tiles add zeros for what a lane cannot see.
//
// Scores are taken transposed (positions x lanes), so keys are tile rows straight from the cache and the softmax again
// keeps one lane in one vector element. Queries and probabilities enter as the sum of two bfloat16 numbers (16 bits of
// precision); keys and values are bfloat16 anyway.
#pragma once

#include "attention.h"

namespace dspark {

#if defined(DSPARK_AMX)

constexpr int kTileChunk = 64;
constexpr int kMaxTileBlocks = 4;  // blocks of 16 lanes that share one look at keys and values

inline bool can_use_tiles(int head_dim, int page_size, bool is_bf16) {
    return is_bf16 && head_dim % 32 == 0 && page_size % 16 == 0 && has_amx();
}

// While it lives, the calling thread's eight tiles have 16 rows of 64 bytes.
class FullTiles {
   public:
    FullTiles() {
        struct alignas(64) Config {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        for (int tile = 0; tile < 8; ++tile) {
            config.bytes[tile] = 64;
            config.rows[tile] = 16;
        }
        asm volatile("" : : "r"(&config) : "memory");  // the instruction reads all of it
        _tile_loadconfig(&config);
    }
    ~FullTiles() { _tile_release(); }
    FullTiles(const FullTiles&) = delete;
    FullTiles& operator=(const FullTiles&) = delete;
};

// Per thread, in floats: queries and sums of each block, scores, packed probabilities, packed values.
inline size_t tile_floats(int head_dim) {
    return size_t(kMaxTileBlocks * 32 * head_dim + 2 * kTileChunk * 16 + kTileChunk * head_dim / 2);
}

inline void transpose(__m512i r[16]) {  // 16 x 16 units of 4 bytes
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int c = 0; c < 4; ++c) {
        t[c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88);
        t[4 + c] = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xdd);
        t[8 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
        t[12 + c] = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xdd);
    }
    for (int c = 0; c < 4; ++c) {
        r[c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0x88);
        r[4 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0x88);
        r[8 + c] = _mm512_shuffle_i32x4(t[c], t[8 + c], 0xdd);
        r[12 + c] = _mm512_shuffle_i32x4(t[4 + c], t[12 + c], 0xdd);
    }
}

// a and b, 16 floats each, rounded to bfloat16: a in the lower half of the result, b in the upper.
inline __m512i narrow(__m512 a, __m512 b) { return (__m512i)_mm512_cvtne2ps_pbh(b, a); }

inline __m512 widen(__m256i half) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

struct Split {
    __m512i high, low;  // bfloat16 numbers whose sum is nearly the float
};

inline Split split(__m512 a, __m512 b) {
    const __m512i high = narrow(a, b);
    const __m512 rest_a = _mm512_sub_ps(a, widen(_mm512_castsi512_si256(high)));
    const __m512 rest_b = _mm512_sub_ps(b, widen(_mm512_extracti64x4_epi64(high, 1)));
    return {high, narrow(rest_a, rest_b)};
}

// Word 2i of the result is word i of the lower half, word 2i + 1 is word i of the upper half.
inline __m512i interleave_halves(__m512i v) {
    alignas(64) static constexpr uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(order), v);
}

// Queries of a block -> for each 32 elements two tiles, high and low: row e / 2, column lane, word e % 2.
inline void pack_queries(const AttentionLayer& layer, const LaneBlock& block, uint16_t* packed) {
    for (int e = 0; e < layer.head_dim; e += 32, packed += 1024) {
        __m512i high[16] = {}, low[16] = {};
        for (int lane = 0; lane < block.end - block.begin; ++lane) {
            const float* q = lane_query(layer, block, block.begin + lane) + e;
            const Split parts = split(_mm512_loadu_ps(q), _mm512_loadu_ps(q + 16));
            high[lane] = parts.high;
            low[lane] = parts.low;
        }
        transpose(high);
        transpose(low);
        for (int i = 0; i < 16; ++i) {
            _mm512_store_si512(packed + i * 32, high[i]);
            _mm512_store_si512(packed + 512 + i * 32, low[i]);
        }
    }
}

// Probabilities (positions, lanes) of 32 positions -> two tiles, high and low: row lane, word position.
inline void pack_probabilities(const float* probabilities, uint16_t* packed) {
    __m512i high[16], low[16];
    for (int i = 0; i < 16; ++i) {
        const Split parts = split(_mm512_load_ps(probabilities + 32 * i), _mm512_load_ps(probabilities + 32 * i + 16));
        high[i] = interleave_halves(parts.high);
        low[i] = interleave_halves(parts.low);
    }
    transpose(high);
    transpose(low);
    for (int i = 0; i < 16; ++i) {
        _mm512_store_si512(packed + i * 32, high[i]);
        _mm512_store_si512(packed + 512 + i * 32, low[i]);
    }
}

// Values of 16 positions from `first` on -> half of the tiles of 32: tile e / 16, row position / 2, column e, word
// position % 2. Positions outside `seen` become zero, whatever lies there.
inline void pack_values(const AttentionLayer& layer, const LaneBlock& block, int first, LaneSpan seen,
                        uint16_t* packed) {
    const int dim = layer.head_dim;
    const int64_t step = int64_t(layer.num_kv_heads) * dim;
    const auto* even = static_cast<const uint16_t*>(layer.values);
    if (first <= seen.last) even += cache_offset(layer, block, first);
    for (int i = 0; i < 16; i += 2, packed += 32, even += 2 * step) {
        const int position = first + i;
        const __mmask32 even_mask = position >= seen.first && position <= seen.last ? ~0u : 0u;
        const __mmask32 odd_mask = position + 1 >= seen.first && position + 1 <= seen.last ? ~0u : 0u;
        for (int e = 0; e < dim; e += 32) {
            const __m512i a = _mm512_maskz_loadu_epi16(even_mask, even + e);
            const __m512i b = _mm512_maskz_loadu_epi16(odd_mask, even + step + e);
            uint16_t* out = packed + e * 32;
            _mm512_store_si512(out, interleave_halves(_mm512_inserti64x4(a, _mm512_castsi512_si256(b), 1)));
            _mm512_store_si512(out + 512, interleave_halves(_mm512_shuffle_i64x2(a, b, 0xee)));
        }
    }
}

// scores (16 num_tiles positions, lanes) of positions from `first` on.
inline void score_tiles(const AttentionLayer& layer, const LaneBlock& block, int first, int num_tiles,
                        const uint16_t* queries, float* scores) {
    const auto* keys = static_cast<const uint16_t*>(layer.keys);
    const uint16_t* rows[4];
    for (int i = 0; i < num_tiles; ++i) rows[i] = keys + cache_offset(layer, block, first + 16 * i);
    const int64_t stride = int64_t(layer.num_kv_heads) * layer.head_dim * 2;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
#define DSPARK_SCORE(sum, keys_tile)                            \
    if (num_tiles > sum) {                                      \
        _tile_loadd(keys_tile, rows[sum] + e, stride);          \
        _tile_dpbf16ps(sum, keys_tile, 4);                      \
        _tile_dpbf16ps(sum, keys_tile, 5);                      \
    }
    for (int e = 0; e < layer.head_dim; e += 32, queries += 1024) {
        _tile_loadd(4, queries, 64);
        _tile_loadd(5, queries + 512, 64);
        DSPARK_SCORE(0, 6)
        DSPARK_SCORE(1, 7)
        DSPARK_SCORE(2, 6)
        DSPARK_SCORE(3, 7)
    }
#undef DSPARK_SCORE
    _tile_stored(0, scores, 64);
    _tile_stored(1, scores + 256, 64);
    _tile_stored(2, scores + 512, 64);
    _tile_stored(3, scores + 768, 64);
}

// sums (lanes, dim) += probabilities . values for one or two halves of 32 positions.
inline void add_tiles(const uint16_t* probabilities, const uint16_t* values, int halves, int dim, float* sums) {
#define DSPARK_ADD(sum, values_tile)                                    \
    if (e + 16 * sum < dim) {                                           \
        _tile_loadd(values_tile, column + sum * 512, 64);               \
        _tile_dpbf16ps(sum, 4, values_tile);                            \
        _tile_dpbf16ps(sum, 5, values_tile);                            \
    }
#define DSPARK_LOAD(sum) \
    if (e + 16 * sum < dim) _tile_loadd(sum, sums + e + 16 * sum, dim * 4);
#define DSPARK_STORE(sum) \
    if (e + 16 * sum < dim) _tile_stored(sum, sums + e + 16 * sum, dim * 4);
    for (int e = 0; e < dim; e += 64) {
        DSPARK_LOAD(0) DSPARK_LOAD(1) DSPARK_LOAD(2) DSPARK_LOAD(3)
        for (int half = 0; half < halves; ++half) {
            const uint16_t* column = values + half * 32 * dim + e * 32;
            _tile_loadd(4, probabilities + half * 1024, 64);
            _tile_loadd(5, probabilities + half * 1024 + 512, 64);
            DSPARK_ADD(0, 6) DSPARK_ADD(1, 7) DSPARK_ADD(2, 6) DSPARK_ADD(3, 7)
        }
        DSPARK_STORE(0) DSPARK_STORE(1) DSPARK_STORE(2) DSPARK_STORE(3)
    }
#undef DSPARK_ADD
#undef DSPARK_LOAD
#undef DSPARK_STORE
}

inline void scale_lanes(Vec scale, int num_lanes, int dim, float* sums) {
    if (_mm512_cmpneq_ps_mask((__m512)scale, _mm512_set1_ps(1.0f)) == 0) return;  // a factor of 1 changes no bit
    for (int lane = 0; lane < num_lanes; ++lane)
        for (int e = 0; e < dim; e += 16) store(sums + lane * dim + e, load(sums + lane * dim + e) * scale[lane]);
}

// Rows lie apart, which the processor does not foresee: ask for the next chunk's while this one is worked on.
inline void prefetch_chunk(const AttentionLayer& layer, const LaneBlock& block, int first, int last) {
    const int64_t step = int64_t(layer.num_kv_heads) * layer.head_dim * 2;
    for (int start = first; start <= last; start += 16) {
        const int64_t offset = cache_offset(layer, block, start) * 2;
        const char* keys = static_cast<const char*>(layer.keys) + offset;
        const char* values = static_cast<const char*>(layer.values) + offset;
        for (int i = 0; i < 16; ++i, keys += step, values += step)
            for (int byte = 0; byte < layer.head_dim * 2; byte += 64) {
                __builtin_prefetch(keys + byte, 0, 2);
                __builtin_prefetch(values + byte, 0, 2);
            }
    }
}

// Up to 16 lanes with their own queries, softmax and sums.
struct TileBlock {
    LaneBlock lanes;
    uint16_t* queries;
    float* sums;
    Softmax softmax;

    int size() const { return lanes.end - lanes.begin; }
};

// What the blocks use one after another.
struct TileScratch {
    float* scores;
    uint16_t *probabilities, *values;
};

// The 64 positions of one chunk for one block; values are packed for positions from `begin` on.
inline void attend_chunk(const AttentionLayer& layer, TileBlock& block, int begin, int end,
                         const TileScratch& scratch) {
    const int num_tiles = (end - begin + 15) / 16, halves = (num_tiles + 1) / 2;
    // The compiler does not know which memory tile instructions read and write.
    asm volatile("" : : : "memory");
    score_tiles(layer, block.lanes, begin, num_tiles, block.queries, scratch.scores);
    asm volatile("" : : : "memory");
    const Vec scale = block.softmax.update(scratch.scores, begin, 16 * num_tiles);
    if (num_tiles % 2) std::memset(scratch.scores + 256 * num_tiles, 0, 1024);
    for (int half = 0; half < halves; ++half)
        pack_probabilities(scratch.scores + 512 * half, scratch.probabilities + 1024 * half);
    scale_lanes(scale, block.size(), layer.head_dim, block.sums);
    asm volatile("" : : : "memory");
    add_tiles(scratch.probabilities, scratch.values, halves, layer.head_dim, block.sums);
    asm volatile("" : : : "memory");
}

inline void start_block(const AttentionLayer& layer, const LaneBlock& all, int index, float* memory, TileBlock& block) {
    const int dim = layer.head_dim;
    block.lanes = all;
    block.lanes.begin = all.begin + 16 * index;
    block.lanes.end = std::min(block.lanes.begin + 16, all.end);
    block.queries = reinterpret_cast<uint16_t*>(memory);
    block.sums = memory + 16 * dim;
    std::memset(block.sums, 0, size_t(16) * dim * 4);
    pack_queries(layer, block.lanes, block.queries);
    limit_lanes(layer, block.lanes, block.softmax);
}

inline void finish_block(const AttentionLayer& layer, const TileBlock& block) {
    const int dim = layer.head_dim;
    const Vec inverse = 1.0f / block.softmax.total;
    for (int lane = 0; lane < block.size(); ++lane) {
        float* out = lane_out(layer, block.lanes, block.lanes.begin + lane);
        for (int e = 0; e < dim; e += 16) store(out + e, load(block.sums + lane * dim + e) * inverse[lane]);
    }
}

// At most 16 kMaxTileBlocks lanes. scratch: tile_floats(head_dim) floats, aligned to 64 bytes. FullTiles must be alive.
inline void attend_with_tiles(const AttentionLayer& layer, const LaneBlock& lanes, float* scratch) {
    const int dim = layer.head_dim, num_blocks = (lanes.end - lanes.begin + 15) / 16;
    TileBlock blocks[kMaxTileBlocks];
    LaneSpan all = {INT32_MAX, -1, 0, 0};
    for (int i = 0; i < num_blocks; ++i) {
        start_block(layer, lanes, i, scratch + int64_t(i) * 32 * dim, blocks[i]);
        all.first = std::min(all.first, blocks[i].softmax.span.first);
        all.last = std::max(all.last, blocks[i].softmax.span.last);
    }
    TileScratch shared;
    shared.scores = scratch + int64_t(kMaxTileBlocks) * 32 * dim;
    shared.probabilities = reinterpret_cast<uint16_t*>(shared.scores + kTileChunk * 16);
    shared.values = shared.probabilities + 2 * kTileChunk * 16;
    for (int chunk = all.first / kTileChunk * kTileChunk; chunk <= all.last; chunk += kTileChunk) {
        const int begin = std::max(chunk, all.first / 32 * 32);  // a tile sums 32 positions: fixed ones, for the law
        const int end = std::min(chunk + kTileChunk, all.last + 1);
        if (num_blocks == 1) prefetch_chunk(layer, lanes, end, std::min(end + kTileChunk - 1, all.last));
        for (int i = 0; i < end - begin; i += 32) {
            uint16_t* half = shared.values + i * dim;
            pack_values(layer, lanes, begin + i, all, half);
            pack_values(layer, lanes, begin + i + 16, all, half + 256);
        }
        for (int i = 0; i < num_blocks; ++i) {
            const LaneSpan& span = blocks[i].softmax.span;
            if (span.first < end && span.last >= begin)
                attend_chunk(layer, blocks[i], begin, std::min(end, span.last + 1), shared);
        }
    }
    for (int i = 0; i < num_blocks; ++i) finish_block(layer, blocks[i]);
}

#endif

}  // namespace dspark
