// The walk over panels, parts of K and rows that one thread makes for one linear layer.
// Never waits for another thread: each owns whole panels of output columns.
#pragma once

#include <type_traits>

#include "linear_amx.h"
#include "linear_amx_int4.h"
#include "linear_bf12.h"
#include "linear_int4.h"
#include "linear_kernels.h"

namespace dspark {

// How a call is cut. A part of the activations (rows x chunk blocks) stays in the second-level cache while the panels
// of a group pass by; the group's sums live in scratch meanwhile. Few rows: the whole K at once, one panel a group.
struct Walk {
  int rows, blocks, panels;
};

constexpr int kMaxWalkRows = 512;
constexpr int kGroupPanels = 8;
constexpr int kVectorRows4 = 4;     // I4: up to here the vector kernel keeps up with the memory
constexpr int kFlatRows = 32;        // up to here weights are read from memory once and sums stay in registers
constexpr int kFewBlocks = 4;        // BF12 blocks decoded at a time while rows are few (8 KB) ...
constexpr int kMaxDecoded = 64;      // ... and while they are many (128 KB)
constexpr int kCachedLines = 4096;   // 256 KB of activations

inline int even_part(int total, int most) {
  const int parts = (total + most - 1) / most;
  return (total + parts - 1) / parts;
}

inline Walk plan_walk(int32_t kind, int blocks, int rows) {
  if (rows <= kFlatRows) return {rows, kind == BF12 ? std::min(kFewBlocks, blocks) : blocks, 1};
  const int part = even_part(rows, kMaxWalkRows);
  // A group of I4 is small, half a line of activations and 576 bytes of weights: take four for one.
  const int cached = (kind == I4 ? 4 : 1) * kCachedLines / part;
  const int most = std::min(kind == BF12 ? kMaxDecoded : 1 << 20, std::max(8, cached));
  const int chunk = even_part(blocks, most);
  return {part, chunk, chunk == blocks ? 1 : kGroupPanels};
}

// Scratch of one thread in run(), for any number of rows up to `rows`. A bound over all walks.
inline size_t scratch_bytes(int32_t kind, int64_t k, int rows) {
  const size_t sums = size_t(std::min(rows, kMaxWalkRows)) * (rows > kFlatRows ? kGroupPanels : 1) * kPanel * 4;
  const size_t decoded = kind == BF12 ? size_t(std::min(num_blocks(kind, k), kMaxDecoded)) * kBlockBytes : 0;
  return 64 + sums + decoded;
}

// Sums of one row and panel -> out: scales, bias, and the sum with what was there.
template <class Acc>
inline void finish_row(const Linear& linear, const Acc* acc, const uint8_t* a, int panel, float* out, bool accumulate) {
  const int first = panel * kPanel, count = std::min(kPanel, linear.n - first);
  float value[kPanel], bias[kPanel] = {};
  if (linear.bias) std::memcpy(bias, linear.bias + first, size_t(count) * 4);
  if constexpr (std::is_same_v<Acc, int32_t>) {
    Int8Tail tail;
    std::memcpy(&tail, a + size_t(linear.blocks) * 64, sizeof tail);
    for (int c = 0; c < kPanel; ++c)
      value[c] = madd(float(acc[c] + tail.correction) * tail.scale, linear.scale[first + c], bias[c]);
  } else {
    for (int c = 0; c < kPanel; ++c) value[c] = acc[c] + bias[c];
  }
  if (accumulate)
    for (int c = 0; c < count; ++c) out[c] += value[c];
  else
    std::memcpy(out, value, size_t(count) * 4);
}

struct Output {
  float* out;
  int64_t ldo;
  bool accumulate;
};

// Where the next blocks of a panel lie; BF12 blocks differ in size, so each panel of a group keeps its place.
inline const uint8_t* panel_start(const Linear& linear, int panel) {
  if (linear.kind == BF12) return linear.data + linear.offset[panel];
  const size_t bytes = linear.kind == I4 ? kGroup4Bytes : kBlockBytes;
  return linear.data + size_t(panel) * linear.blocks * bytes;
}

// One chunk for all rows. Few rows stream its weights as they go (the caller's `ahead_lines`); under many rows the
// next `ahead_bytes` of weights come in bit by bit.
template <class Kernel>
inline void multiply_chunk(Kernel& kernel, Chunk chunk, int rows, size_t ahead_bytes) {
  auto* acc = static_cast<typename Kernel::Acc*>(chunk.acc);
  const uint8_t* a = chunk.a;
  const uint8_t* ahead = chunk.ahead;
  const int calls = (rows + Kernel::kRows - 1) / Kernel::kRows;
  const int own = chunk.ahead_lines;
  const int lines = int(ahead_bytes / 64 / (size_t(calls) * chunk.blocks)) + 1;
  for (int r = 0; r < rows; r += Kernel::kRows) {
    chunk.rows = std::min(Kernel::kRows, rows - r);
    chunk.a = a + r * chunk.lda;
    chunk.acc = acc + int64_t(r) * kPanel;
    chunk.ahead = ahead;
    chunk.ahead_lines = calls > 2 ? lines : r == 0 ? own : 0;
    kernel(chunk);
    ahead += size_t(lines) * chunk.blocks * 64;
  }
}

// One group of panels for one part of the rows.
template <class Kernel>
void run_group(Kernel& kernel, const Linear& linear, const uint8_t* a, int rows, const Walk& walk, int panel,
               int panels, uint8_t* scratch, const Output& to) {
  using Acc = typename Kernel::Acc;
  const int64_t lda = int64_t(prepared_bytes(linear.kind, linear.k));
  const bool packed = linear.kind == BF12, fused = packed && Kernel::kDecodes && rows <= Kernel::kRows;
  uint8_t* decoded = scratch + size_t(rows) * panels * kPanel * 4;
  const size_t block_bytes = linear.kind == I4 ? kGroup4Bytes : packed ? kQuads * kQuadBytes : kBlockBytes;
  const uint8_t* place[kGroupPanels];
  for (int p = 0; p < panels; ++p) place[p] = panel_start(linear, panel + p);
  const int step = fused ? linear.blocks : walk.blocks;
  for (int b = 0; b < linear.blocks; b += step) {
    const int blocks = std::min(step, linear.blocks - b);
    for (int p = 0; p < panels; ++p) {
      Chunk chunk{place[p], a, lda, 0, b, blocks, linear.blocks, nullptr, nullptr, kStream, nullptr, nullptr};
      const uint16_t* table = linear.table + size_t(panel + p) * 32;
      const uint8_t* flags = linear.flags + size_t(panel + p) * linear.blocks + b;
      if (fused) {
        chunk.table = table, chunk.flags = flags;
      } else if (packed) {
        place[p] = bf12_decode(place[p], table, flags, blocks, decoded);
        chunk.w = decoded, chunk.ahead_lines = 0;
      } else {
        place[p] += blocks * block_bytes;
      }
      chunk.acc = reinterpret_cast<Acc*>(scratch) + size_t(p) * rows * kPanel;
      chunk.ahead = p + 1 < panels ? place[p + 1] : b + blocks < linear.blocks ? place[0] : place[p];
      multiply_chunk(kernel, chunk, rows, blocks * block_bytes);
    }
  }
  for (int p = 0; p < panels; ++p) {
    const Acc* acc = reinterpret_cast<const Acc*>(scratch) + size_t(p) * rows * kPanel;
    float* out = to.out + int64_t(panel + p) * kPanel;
    for (int r = 0; r < rows; ++r)
      finish_row(linear, acc + r * kPanel, a + r * lda, panel + p, out + r * to.ldo, to.accumulate);
  }
}

template <class Kernel>
void run_with(const Linear& linear, const uint8_t* prepared, int rows, const Output& to, int first, int last,
              uint8_t* scratch) {
  Kernel kernel;
  const Walk walk = plan_walk(linear.kind, linear.blocks, rows);
  const size_t stride = prepared_bytes(linear.kind, linear.k);
  for (int r = 0; r < rows; r += walk.rows)
    for (int p = first; p < last; p += walk.panels)
      run_group(kernel, linear, prepared + r * stride, std::min(walk.rows, rows - r), walk, p,
                std::min(walk.panels, last - p), scratch, Output{to.out + r * to.ldo, to.ldo, to.accumulate});
}

// Thread `tid` of `nt` computes its panels of out[rows, N] (row stride `ldo` floats); accumulate adds to out.
// `prepared` holds rows made by prepare_row, prepared_bytes apart; scratch is the thread's own.
inline void run(const Linear& linear, const void* prepared, int rows, float* out, int64_t ldo, bool accumulate, int tid,
                int nt, void* scratch) {
  const int first = int(int64_t(linear.panels) * tid / nt), last = int(int64_t(linear.panels) * (tid + 1) / nt);
  if (first == last || rows <= 0) return;
  const auto* a = static_cast<const uint8_t*>(prepared);
  auto* mine = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<uintptr_t>(scratch), 64));
  const Output to{out, ldo, accumulate};
  switch (linear.kind) {
    case F32: return run_with<F32Kernel>(linear, a, rows, to, first, last, mine);
    case I4:
#if defined(DSPARK_AMX)
      if (rows > kVectorRows4 && has_amx()) return run_with<Int4AmxKernel>(linear, a, rows, to, first, last, mine);
#endif
      return run_with<Int4Kernel>(linear, a, rows, to, first, last, mine);
    case I8:
#if defined(DSPARK_AMX)
      if (has_amx()) return run_with<AmxKernel<true>>(linear, a, rows, to, first, last, mine);
#endif
      return run_with<Int8Kernel>(linear, a, rows, to, first, last, mine);
    default:
#if defined(DSPARK_AMX)
      if (has_amx()) return run_with<AmxKernel<false>>(linear, a, rows, to, first, last, mine);
#endif
      return run_with<Bf16Kernel>(linear, a, rows, to, first, last, mine);
  }
}

// Which kernels serve BF16 and I8 here, for reports.
inline const char* isa() {
  if (has_amx()) return "amx";
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
  return "avx512";
#else
  return "portable";
#endif
}

}  // namespace dspark
