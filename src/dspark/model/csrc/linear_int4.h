// I4: 4-bit weights in groups of 32 inputs, their quantiser and their vector kernels.
// Never mixes groups: a group's products are summed exactly in int32, then added in order with one float fma.
//
// A group of a panel is 2 halves x 4 x 64 bytes of nibbles and 32 bfloat16 scales. Byte 4c+e of part i of a half
// holds, low nibble first, inputs 8i+e and 8i+4+e of column c, as value + 8.
#pragma once

#include <cmath>

#include "linear_plain.h"
#include "linear_rows.h"

#if defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

namespace dspark {

// Nearest grid of -8..7 for one group at `scale`; returns the squared error after the scale is refitted to the chosen
// integers (least squares) and rounded to bfloat16. `scale` may be negative: it decides which end reaches 8.
inline float int4_try(const float* w, int count, float* scale, int8_t* q) {
  const float inverse = 1.0f / *scale;
  float wq = 0, qq = 0;
  float values[kMaxGroup4];
  for (int i = 0; i < count; ++i) {
    const float v = std::min(7.0f, std::max(-8.0f, w[i] * inverse));
    const int32_t r = round_int(v);
    q[i] = int8_t(r);
    values[i] = float(r);
  }
  for (int i = 0; i < count; ++i) wq = madd(w[i], values[i], wq), qq = madd(values[i], values[i], qq);
  const float fitted = qq > 0 ? wq / qq : *scale;
  *scale = from_bf16(to_bf16(fitted));
  float error = 0;
  for (int i = 0; i < count; ++i) {
    const float d = madd(-*scale, values[i], w[i]);
    error = madd(d, d, error);
  }
  return error;
}

// One group of at most kMaxGroup4 weights -> integers of -8..7 and a bfloat16 scale, the best of several starting
// scales. The same weights give the same bits wherever this is inlined: files must agree with quantising on the fly.
inline uint16_t int4_quantise(const float* w, int count, int8_t* q) {
  float top = 0;
  for (int i = 0; i < count; ++i)
    if (std::abs(w[i]) > std::abs(top)) top = w[i];
  std::memset(q, 0, size_t(count));
  if (!(std::abs(top) > 1e-30f)) return 0;
  // Magnitudes that the largest weight is sent to; below 7 the others gain resolution and it is clipped or shrunk.
  constexpr float ends[] = {-8.0f, -7.5f, -7.0f, -8.6f, -9.3f, 7.0f, 7.6f, -6.4f};
  float best = -1.0f, best_scale = 0;
  int8_t trial[kMaxGroup4];
  for (const float end : ends) {
    float scale = top / end;
    const float error = int4_try(w, count, &scale, trial);
    if (best < 0 || error < best) best = error, best_scale = scale, std::memcpy(q, trial, size_t(count));
  }
  return to_bf16(best_scale);
}

// Integers of 32 columns (row-major [32, 32]) and their scales -> the stored group.
inline void int4_encode(const int8_t* q, const uint16_t* scale, uint8_t* dst) {
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < 4; ++i)
      for (int c = 0; c < 16; ++c)
        for (int e = 0; e < 4; ++e) {
          const int8_t* column = q + (half * 16 + c) * kGroup4 + 8 * i + e;
          *dst++ = uint8_t((column[0] + 8) | (column[4] + 8) << 4);
        }
  std::memcpy(dst, scale, kPanel * 2);
}

struct Int4Row { const int8_t* q; const float* scale; const int32_t* correction; };

inline Int4Row int4_row(const Chunk& chunk, int r) {
  const uint8_t* base = chunk.a + r * chunk.lda;
  const auto* scale = reinterpret_cast<const float*>(base + round_up(size_t(chunk.all_blocks) * kGroup4, 64));
  return {reinterpret_cast<const int8_t*>(base), scale, reinterpret_cast<const int32_t*>(scale + chunk.all_blocks)};
}

#if defined(__AVX512VNNI__)

// The scales of a stored group, for each half of the panel.
inline void int4_scales(const uint8_t* w, __m512* scale) {
  for (int h = 0; h < 2; ++h) {
    const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 512 + h * 32));
    scale[h] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
  }
}

struct Int4Kernel {
  using Acc = float;
  static constexpr int kRows = 8;
  static constexpr bool kDecodes = false;  // BF12 must be decoded before

  template <int R>
  static void rows(Chunk chunk) {
    Int4Row row[R];
    __m512 sum[R][2];
    auto* acc = static_cast<float*>(chunk.acc);
    for (int r = 0; r < R; ++r) {
      row[r] = int4_row(chunk, r);
      for (int h = 0; h < 2; ++h)
        sum[r][h] = chunk.first_block ? _mm512_loadu_ps(acc + r * kPanel + h * 16) : _mm512_setzero_ps();
    }
    const __m512i low = _mm512_set1_epi8(15);
    const uint8_t* w = chunk.w;
    for (int g = chunk.first_block; g < chunk.first_block + chunk.blocks; ++g, w += kGroup4Bytes) {
      if (chunk.ahead_lines == kStream)
        for (int i = 0; i < kGroup4Bytes; i += 64) prefetch_stream(w + i);
      else prefetch_ahead(chunk);
      __m512 scale[2];
      int4_scales(w, scale);
      for (int h = 0; h < 2; ++h) {
        __m512i dot[R];
        for (int r = 0; r < R; ++r) dot[r] = _mm512_set1_epi32(row[r].correction[g]);
        for (int i = 0; i < 4; ++i) {
          const __m512i both = _mm512_loadu_si512(w + h * 256 + i * 64);
          const __m512i first = _mm512_and_si512(both, low);
          const __m512i second = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
          for (int r = 0; r < R; ++r) {
            int32_t a[2];
            std::memcpy(a, row[r].q + g * kGroup4 + i * 8, 8);
            dot[r] = _mm512_dpbusd_epi32(dot[r], first, _mm512_set1_epi32(a[0]));
            dot[r] = _mm512_dpbusd_epi32(dot[r], second, _mm512_set1_epi32(a[1]));
          }
        }
        for (int r = 0; r < R; ++r)
          sum[r][h] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r]),
                                      _mm512_mul_ps(scale[h], _mm512_set1_ps(row[r].scale[g])), sum[r][h]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < 2; ++h) _mm512_storeu_ps(acc + r * kPanel + h * 16, sum[r][h]);
  }

  void operator()(const Chunk& chunk) {
    switch (chunk.rows) {
      case 1: return rows<1>(chunk);
      case 2: return rows<2>(chunk);
      case 3: return rows<3>(chunk);
      case 4: return rows<4>(chunk);
      case 5: return rows<5>(chunk);
      case 6: return rows<6>(chunk);
      case 7: return rows<7>(chunk);
      default: return rows<8>(chunk);
    }
  }
};

#else

using Int4Kernel = PlainInt4Kernel;

#endif

}  // namespace dspark
