// Vector kernels of F32, BF16 and I8: AVX-512 where its dot products exist, else those of linear_plain.h.
// Never splits the sum of an element: one accumulator runs over K from first to last, whatever the number of rows.
#pragma once

#include "linear_plain.h"
#include "linear_rows.h"

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
#endif

namespace dspark {

#if defined(__AVX512F__) && defined(__AVX512BW__)

struct WideF32 {
  using Acc = float;
  static __m512i dot(__m512i acc, __m512i w, __m512i a) {
    return _mm512_castps_si512(
        _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_castsi512_ps(a), _mm512_castsi512_ps(acc)));
  }
};

#if defined(__AVX512BF16__)
struct WideBf16 {
  using Acc = float;
  static __m512i dot(__m512i acc, __m512i w, __m512i a) {
    return _mm512_castps_si512(_mm512_dpbf16_ps(_mm512_castsi512_ps(acc), (__m512bh)w, (__m512bh)a));
  }
};
#endif

#if defined(__AVX512VNNI__)
struct WideI8 {
  using Acc = int32_t;
  static __m512i dot(__m512i acc, __m512i w, __m512i a) { return _mm512_dpbusd_epi32(acc, w, a); }
};
#endif

template <class Dot>
struct WideKernel {
  using Acc = typename Dot::Acc;
  static constexpr int kRows = 8;
  static constexpr bool kDecodes = false;  // BF12 must be decoded before

  template <int R, bool Stream>
  static void rows(Chunk chunk) {
    auto* acc = static_cast<int32_t*>(chunk.acc);
    __m512i sum[R][2];
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < 2; ++h)
        sum[r][h] = chunk.first_block ? _mm512_loadu_si512(acc + r * kPanel + h * 16) : _mm512_setzero_si512();
    const uint8_t* w = chunk.w;
    const uint8_t* a = chunk.a + chunk.first_block * 64;
    for (int b = 0; b < chunk.blocks; ++b, w += kBlockBytes, a += 64) {
      if (!Stream) prefetch_ahead(chunk);
      for (int s = 0; s < kSteps; ++s) {
        if (Stream) {
          prefetch_stream(w + s * 128);
          prefetch_stream(w + s * 128 + 64);
        }
        const __m512i w0 = _mm512_loadu_si512(w + s * 64), w1 = _mm512_loadu_si512(w + 1024 + s * 64);
        for (int r = 0; r < R; ++r) {
          int32_t word;
          std::memcpy(&word, a + r * chunk.lda + s * 4, 4);
          const __m512i x = _mm512_set1_epi32(word);
          sum[r][0] = Dot::dot(sum[r][0], w0, x);
          sum[r][1] = Dot::dot(sum[r][1], w1, x);
        }
      }
    }
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < 2; ++h) _mm512_storeu_si512(acc + r * kPanel + h * 16, sum[r][h]);
  }

  template <int R>
  static void either(const Chunk& chunk) {
    chunk.ahead_lines == kStream ? rows<R, true>(chunk) : rows<R, false>(chunk);
  }

  void operator()(const Chunk& chunk) {
    switch (chunk.rows) {
      case 1: return either<1>(chunk);
      case 2: return either<2>(chunk);
      case 3: return either<3>(chunk);
      case 4: return either<4>(chunk);
      case 5: return either<5>(chunk);
      case 6: return either<6>(chunk);
      case 7: return either<7>(chunk);
      default: return either<8>(chunk);
    }
  }
};

using F32Kernel = WideKernel<WideF32>;
#else
using F32Kernel = PlainKernel<PlainF32>;
#endif

#if defined(__AVX512BF16__)
using Bf16Kernel = WideKernel<WideBf16>;
#else
using Bf16Kernel = PlainKernel<PlainBf16>;
#endif

#if defined(__AVX512VNNI__)
using Int8Kernel = WideKernel<WideI8>;
#else
using Int8Kernel = PlainKernel<PlainI8>;
#endif

}  // namespace dspark
