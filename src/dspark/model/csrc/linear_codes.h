// Quantised weights row by row, as files keep them: from weights to codes, and from codes to a blob.
// Never rounds twice: a blob made from codes is the blob that pack() makes from the weights, bit by bit.
//
// I8: codes int8 [n, k], scales float [n]. I4: codes [n, (k + 1) / 2], a byte holding inputs 2j (low nibble) and 2j + 1
// as value + 8; scales bfloat16 [n, groups], a group being `group` inputs, the last one of a row perhaps fewer.
#pragma once

#include "linear_pack.h"

namespace dspark {

inline int64_t groups_of(int64_t k, int32_t group) { return (k + group - 1) / group; }

inline void quantise_int4_row(const float* w, int64_t k, int32_t group, uint8_t* codes, uint16_t* scales) {
  int8_t q[kMaxGroup4];
  std::memset(codes, 0x88, size_t((k + 1) / 2));
  for (int64_t first = 0; first < k; first += group) {
    const int count = int(std::min<int64_t>(group, k - first));
    *scales++ = int4_quantise(w + first, count, q);
    for (int i = 0; i < count; ++i) {
      uint8_t& byte = codes[(first + i) / 2];
      byte = i % 2 ? uint8_t((byte & 0x0f) | (q[i] + 8) << 4) : uint8_t((byte & 0xf0) | (q[i] + 8));
    }
  }
}

inline void quantise(int32_t kind, int64_t n, int64_t k, int32_t group, const float* weight, void* codes, void* scales,
                     int threads) {
  assert(kind == I8 || (group % kGroup4 == 0 && group <= kMaxGroup4));
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t row = 0; row < n; ++row) {
    if (kind == I8) {
      int32_t sum;
      static_cast<float*>(scales)[row] =
          quantise_int8(weight + row * k, k, static_cast<int8_t*>(codes) + row * k, &sum);
    } else {
      quantise_int4_row(weight + row * k, k, group, static_cast<uint8_t*>(codes) + row * ((k + 1) / 2),
                        static_cast<uint16_t*>(scales) + row * groups_of(k, group));
    }
  }
}

inline void lay_int8_codes(const Linear& linear, const int8_t* codes, int panel, Stage& stage, uint8_t* dst) {
  const size_t width = size_t(linear.blocks) * 64, k = size_t(linear.k);
  stage.rows.assign(width * kPanel, 0);
  for (int c = 0; c < kPanel && panel * kPanel + c < linear.n; ++c) {
    const int8_t* row = codes + (size_t(panel) * kPanel + c) * k;
    uint8_t* to = stage.rows.data() + c * width;
    for (size_t i = 0; i < k; ++i) to[i] = uint8_t(row[i]) ^ 0x80u;
  }
  lay_blocks(stage, linear.blocks, dst);
}

// The scale of a larger group goes to each 32 inputs of it.
inline void lay_int4_codes(const Linear& linear, const uint8_t* codes, const uint16_t* scales, int32_t group, int panel,
                           uint8_t* dst) {
  const int64_t k = linear.k, width = (k + 1) / 2, groups = groups_of(k, group);
  for (int g = 0; g < linear.blocks; ++g, dst += kGroup4Bytes) {
    int8_t q[kPanel * kGroup4] = {};
    uint16_t scale[kPanel] = {};
    const int64_t first = int64_t(g) * kGroup4;
    const int count = int(std::min<int64_t>(kGroup4, k - first));
    for (int c = 0; c < kPanel && panel * kPanel + c < linear.n; ++c) {
      const int64_t row = int64_t(panel) * kPanel + c;
      const uint8_t* bytes = codes + row * width + first / 2;
      scale[c] = scales[row * groups + first / group];
      for (int i = 0; i < count; ++i)
        q[c * kGroup4 + i] = int8_t((i % 2 ? bytes[i / 2] >> 4 : bytes[i / 2] & 15) - 8);
    }
    int4_encode(q, scale, dst);
  }
}

inline size_t pack_codes(int32_t kind, int64_t n, int64_t k, int32_t group, const void* codes, const void* scales,
                         void* blob, int threads) {
  auto* base = static_cast<uint8_t*>(blob);
  const Linear linear = view(kind, n, k, blob, nullptr);
  const BlobLayout at = blob_layout(kind, n, k);
  if (kind == I8) {
    auto* scale = reinterpret_cast<float*>(base + at.scale);
    std::memset(scale, 0, size_t(linear.panels) * kPanel * 4);
    std::memcpy(scale, scales, size_t(n) * 4);
  }
#pragma omp parallel num_threads(threads)
  {
    Stage stage;
#pragma omp for schedule(dynamic, 4)
    for (int p = 0; p < linear.panels; ++p) {
      uint8_t* dst = base + (panel_start(linear, p) - base);
      if (kind == I8) lay_int8_codes(linear, static_cast<const int8_t*>(codes), p, stage, dst);
      else
        lay_int4_codes(linear, static_cast<const uint8_t*>(codes), static_cast<const uint16_t*>(scales), group, p, dst);
    }
  }
  return at.bound;
}

}  // namespace dspark
