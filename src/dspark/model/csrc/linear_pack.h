// From row-major weights to a blob, all kinds, on several threads.
// Never keeps a second copy of the layer: a thread stages one panel at a time.
#pragma once

#include <vector>

#include "linear_bf12.h"
#include "linear_int4.h"

namespace dspark {

// What a panel is made of before it is laid out: 32 rows of `blocks` * 64 bytes, zero padded.
struct Stage {
  std::vector<uint8_t> rows;
  std::vector<uint8_t> laid;
};

// Weights of one column -> offset binary int8 (value + 128); returns the scale.
inline float pack_int8_row(const float* w, int64_t k, uint8_t* dst) {
  int32_t sum;
  const float scale = quantise_int8(w, k, reinterpret_cast<int8_t*>(dst), &sum);
  for (int64_t i = 0; i < k; ++i) dst[i] ^= 0x80u;
  return scale;
}

// Copy, round or quantise the rows of one panel into the stage.
inline void stage_rows(const Linear& linear, const void* weight, int panel, Stage& stage, float* scale) {
  const size_t width = size_t(linear.blocks) * 64, k = size_t(linear.k);
  stage.rows.assign(width * kPanel, 0);
  for (int c = 0; c < kPanel; ++c) {
    const int64_t row = int64_t(panel) * kPanel + c;
    if (row >= linear.n) {
      if (scale) scale[c] = 0.0f;
      continue;
    }
    uint8_t* dst = stage.rows.data() + c * width;
    const auto* floats = static_cast<const float*>(weight) + row * k;
    if (linear.kind == I8) scale[c] = pack_int8_row(floats, linear.k, dst);
    else if (linear.kind == F32) std::memcpy(dst, floats, k * 4);
    else std::memcpy(dst, static_cast<const uint16_t*>(weight) + row * k, k * 2);
  }
}

// Staged rows -> blocks: a transposition of 4-byte units.
inline void lay_blocks(const Stage& stage, int blocks, uint8_t* dst) {
  const auto* src = reinterpret_cast<const uint32_t*>(stage.rows.data());
  auto* out = reinterpret_cast<uint32_t*>(dst);
  const size_t width = size_t(blocks) * kSteps;
  for (int b = 0; b < blocks; ++b)
    for (int h = 0; h < 2; ++h)
      for (int s = 0; s < kSteps; ++s)
        for (int c = 0; c < 16; ++c) *out++ = src[(h * 16 + c) * width + size_t(b) * kSteps + s];
}

inline void pack_int4_panel(const Linear& linear, const float* weight, int panel, uint8_t* dst) {
  for (int g = 0; g < linear.blocks; ++g, dst += kGroup4Bytes) {
    int8_t q[kPanel * kGroup4] = {};
    uint16_t scale[kPanel] = {};
    for (int c = 0; c < kPanel; ++c) {
      const int64_t row = int64_t(panel) * kPanel + c, first = int64_t(g) * kGroup4;
      if (row >= linear.n) continue;
      float w[kGroup4] = {};
      std::memcpy(w, weight + row * linear.k + first, size_t(std::min<int64_t>(kGroup4, linear.k - first)) * 4);
      scale[c] = int4_quantise(w, kGroup4, q + c * kGroup4);
    }
    int4_encode(q, scale, dst);
  }
}

// Panels of BF12 differ in size: first measure them all, then write them where they belong.
inline size_t pack_bf12(const Linear& linear, const void* weight, uint8_t* base, int threads) {
  const BlobLayout at = blob_layout(BF12, linear.n, linear.k);
  auto* offset = reinterpret_cast<uint64_t*>(base + at.offset);
  auto* table = reinterpret_cast<uint16_t*>(base + at.table);
  uint8_t* flags = base + at.flags;
  const size_t blocks = linear.blocks;
  std::vector<uint8_t> index(size_t(linear.panels) * 256);
#pragma omp parallel num_threads(threads)
  {
    Stage stage;
    stage.laid.resize(blocks * kBlockBytes);
    const auto* laid = reinterpret_cast<const uint16_t*>(stage.laid.data());
#pragma omp for schedule(dynamic, 4)
    for (int p = 0; p < linear.panels; ++p) {
      stage_rows(linear, weight, p, stage, nullptr);
      lay_blocks(stage, linear.blocks, stage.laid.data());
      bf12_table(laid, int64_t(blocks) * 1024, table + p * 32, &index[size_t(p) * 256]);
      uint64_t bytes = 0;
      for (size_t b = 0; b < blocks; ++b) {
        flags[p * blocks + b] = bf12_raw_quads(laid + b * 1024, &index[size_t(p) * 256]);
        bytes += bf12_block_bytes(flags[p * blocks + b]);
      }
      offset[p + 1] = bytes;
    }
#pragma omp single
    {
      offset[0] = 0;
      for (int p = 0; p < linear.panels; ++p) offset[p + 1] += offset[p];
    }
#pragma omp for schedule(dynamic, 4)
    for (int p = 0; p < linear.panels; ++p) {
      stage_rows(linear, weight, p, stage, nullptr);
      lay_blocks(stage, linear.blocks, stage.laid.data());
      uint8_t* dst = base + at.data + offset[p];
      for (size_t b = 0; b < blocks; ++b)
        dst = bf12_encode(laid + b * 1024, &index[size_t(p) * 256], flags[p * blocks + b], dst);
    }
  }
  return at.data + offset[linear.panels];
}

// weight: row-major [n, k], float32 for F32, I8 and I4, bfloat16 bits for BF16 and BF12. blob: packed_bytes, aligned to
// 64 bytes. Returns the bytes used (less than packed_bytes for BF12). The same weights give the same bytes for any
// number of threads.
inline size_t pack(int32_t kind, int64_t n, int64_t k, const void* weight, void* blob, int threads) {
  auto* base = static_cast<uint8_t*>(blob);
  const Linear linear = view(kind, n, k, blob, nullptr);
  const BlobLayout at = blob_layout(kind, n, k);
  if (kind == BF12) {
    std::memset(base, 0, at.data);
    return pack_bf12(linear, weight, base, threads);
  }
#pragma omp parallel num_threads(threads)
  {
    Stage stage;
#pragma omp for schedule(dynamic, 4)
    for (int p = 0; p < linear.panels; ++p) {
      uint8_t* dst = base + (panel_start(linear, p) - base);
      if (kind == I4) {
        pack_int4_panel(linear, static_cast<const float*>(weight), p, dst);
        continue;
      }
      float* scale = kind == I8 ? reinterpret_cast<float*>(base + at.scale) + p * kPanel : nullptr;
      stage_rows(linear, weight, p, stage, scale);
      lay_blocks(stage, linear.blocks, dst);
    }
  }
  return at.bound;
}

}  // namespace dspark
