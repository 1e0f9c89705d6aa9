// A linear layer on packed weights: out[M, N] = x[M, K] * W[N, K]^T (+ bias), one call by a team of threads.
// Never lets a row feel its company: the order of summation of an output element is the same for every M,
// row index, thread count and split of N. Nothing here allocates, locks or waits.
//
// Weights lie in panels of 32 output columns. A panel is a run of blocks of 2048 bytes: two halves of 16 columns,
// each 16 steps of 64 bytes, a step holding for every column the 4 bytes of W (1 float, 2 bfloat16 or 4 int8)
// that meet 4 bytes of an activation row. This is what AMX tiles and the AVX-512 dot products want.
// The layout does not depend on the instruction set; only the order of summation does.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace dspark {

enum Kind : int32_t { F32 = 0, BF16 = 1, BF12 = 2, I8 = 3, I4 = 4 };

constexpr int kPanel = 32;          // output columns of a panel
constexpr int kSteps = 16;          // steps of a block
constexpr int kBlockBytes = 2048;   // 2 halves x 16 steps x 64 bytes
constexpr int kGroup4 = 32;         // inputs that share a scale in kind I4
constexpr int kMaxGroup4 = 128;     // inputs that may share a scale in a file: it is stored for each 32 of them here
constexpr int kGroup4Bytes = 576;   // 512 bytes of nibbles and 32 bfloat16 scales
constexpr int kQuads = 8;           // independently stored parts of a BF12 block: 128 weights each

// A view of one packed layer; owns nothing.
struct Linear {
  int32_t kind, n, k;
  int32_t panels, blocks;          // panels of 32 columns; blocks (I4: groups) along K
  const uint8_t* data;             // the panels, in order
  const float* scale;              // I8: one a column
  const uint64_t* offset;          // BF12: where each panel starts in data
  const uint16_t* table;           // BF12: 32 exponents (16, twice) a panel, already shifted into place
  const uint8_t* flags;            // BF12: one byte a block, bit j set when quad j is stored raw
  const float* bias;               // N floats or null
};

inline size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// Inputs along K that one block covers.
inline int block_inputs(int32_t kind) { return kind == F32 ? 16 : kind == I8 ? 64 : 32; }

inline int num_blocks(int32_t kind, int64_t k) {
  return int(round_up(size_t(k), block_inputs(kind)) / block_inputs(kind));
}

inline int num_panels(int64_t n) { return int((n + kPanel - 1) / kPanel); }

// Where the parts of a blob begin, in bytes.
struct BlobLayout {
  size_t scale, offset, table, flags, data, bound;
};

inline BlobLayout blob_layout(int32_t kind, int64_t n, int64_t k) {
  const size_t panels = num_panels(n), blocks = num_blocks(kind, k);
  BlobLayout at{};
  if (kind == I8) at.data = panels * kPanel * sizeof(float);
  if (kind == BF12) {
    at.table = round_up((panels + 1) * sizeof(uint64_t), 64);
    at.flags = at.table + panels * 64;
    at.data = at.flags + round_up(panels * blocks, 64);
  }
  at.bound = at.data + panels * blocks * size_t(kind == I4 ? kGroup4Bytes : kBlockBytes);
  return at;
}

// Bytes a blob may need; exact for every kind but BF12, whose true size pack() returns.
inline size_t packed_bytes(int32_t kind, int64_t n, int64_t k) { return blob_layout(kind, n, k).bound; }

// `blob` must be aligned to 64 bytes and outlive the view.
inline Linear view(int32_t kind, int64_t n, int64_t k, const void* blob, const float* bias) {
  assert(reinterpret_cast<uintptr_t>(blob) % 64 == 0);
  const auto* base = static_cast<const uint8_t*>(blob);
  const BlobLayout at = blob_layout(kind, n, k);
  Linear linear{};
  linear.kind = kind, linear.n = int32_t(n), linear.k = int32_t(k);
  linear.panels = num_panels(n), linear.blocks = num_blocks(kind, k);
  linear.data = base + at.data;
  linear.scale = reinterpret_cast<const float*>(base + at.scale);
  linear.offset = reinterpret_cast<const uint64_t*>(base + at.offset);
  linear.table = reinterpret_cast<const uint16_t*>(base + at.table);
  linear.flags = base + at.flags;
  linear.bias = bias;
  return linear;
}

// What a kernel is asked for: acc[rows, 32] (+)= activations x one panel, over some consecutive blocks.
struct Chunk {
  const uint8_t* w;       // first block of the chunk
  const uint8_t* a;       // first prepared row
  int64_t lda;            // bytes from row to row
  int rows;               // at most the kernel's kRows
  int first_block, blocks, all_blocks;
  void* acc;              // rows x 32 float (int32 for I8), contiguous
  const uint8_t* ahead;   // weights that will be wanted next, to be prefetched ...
  int ahead_lines;        // ... so many cache lines a block; kStream: all that w itself will need soon
  const uint16_t* table;  // not null: w is BF12, to be decoded by the kernel
  const uint8_t* flags;   // BF12 flags of the first block
};

constexpr int kStream = -1;
// Bytes between a use of streamed weights and their prefetch: early into the second-level cache, which takes more
// requests at a time and is not crowded by lines a page apart, and then into the first.
constexpr int kStreamAhead = 8192, kStreamSoon = 1024;

// Asks for what will be wanted after the cache line `at`.
inline void prefetch_stream(const uint8_t* at) {
  __builtin_prefetch(at + kStreamAhead, 0, 2);
  __builtin_prefetch(at + kStreamSoon);
}

inline void prefetch_ahead(Chunk& chunk) {
  for (int i = 0; i < chunk.ahead_lines; ++i, chunk.ahead += 64) __builtin_prefetch(chunk.ahead, 0, 2);
}

}  // namespace dspark

#include "linear_rows.h"
#include "linear_bf12.h"
#include "linear_int4.h"
#include "linear_kernels.h"
#include "linear_amx.h"
#include "linear_amx_int4.h"
#include "linear_run.h"
#include "linear_pack.h"
