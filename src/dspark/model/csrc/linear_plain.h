// Kernels of every kind for machines without AVX-512 dot products: compiler vectors of 8 lanes, AVX2 where it helps.
// Never splits the sum of an element: one accumulator runs over K from first to last, whatever the number of rows.
#pragma once

#include "linear_rows.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace dspark {

typedef float Float8 __attribute__((vector_size(32)));
typedef int32_t Int8x32 __attribute__((vector_size(32)));
typedef uint32_t Word8 __attribute__((vector_size(32)));

template <class Vector>
inline void load8(Vector& v, const void* p) { std::memcpy(&v, p, sizeof v); }

inline uint32_t load_word(const void* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

// A step is expanded once for all rows (Weights), an activation word once for all columns (Input).
struct PlainF32 {
  using Acc = float;
  using Sum = Float8;
  struct Weights { Float8 w; };
  struct Input { float x; };
  static void expand(Weights& to, const Word8& w) { to.w = Float8(w); }
  static void spread(Input& to, uint32_t a) { to.x = bits_float(a); }
  static void add(Sum& sum, const Weights& w, const Input& a) { sum = w.w * a.x + sum; }
};

struct PlainBf16 {
  using Acc = float;
  using Sum = Float8;
  struct Weights { Float8 even, odd; };
  struct Input { float even, odd; };
  static void expand(Weights& to, const Word8& w) {
    to.even = Float8(w << 16), to.odd = Float8(w & 0xffff0000u);  // the bits, not their values
  }
  static void spread(Input& to, uint32_t a) { to.even = bits_float(a << 16), to.odd = bits_float(a & 0xffff0000u); }
  // Products of two bfloat16 are exact in float32, so fused or not makes no difference.
  static void add(Sum& sum, const Weights& w, const Input& a) {
    sum = w.even * a.even + sum;
    sum = w.odd * a.odd + sum;
  }
};

// Unsigned weight bytes times signed activation bytes, exact in int32.
struct PlainI8 {
  using Acc = int32_t;
  using Sum = Int8x32;
  struct Weights { Word8 even, odd; };  // bytes 0 and 2, 1 and 3, as 16-bit pairs
  struct Input { uint32_t even, odd; };
  static void expand(Weights& to, const Word8& w) {
    to.even = w & 0x00ff00ffu, to.odd = (w >> 8) & 0x00ff00ffu;
  }
  static uint32_t pair(int8_t low, int8_t high) { return uint32_t(uint16_t(low)) | uint32_t(uint16_t(high)) << 16; }
  static void spread(Input& to, uint32_t a) {
    to.even = pair(int8_t(a), int8_t(a >> 16)), to.odd = pair(int8_t(a >> 8), int8_t(a >> 24));
  }
  static void add_pairs(Sum& sum, const Word8& w, uint32_t a) {
#if defined(__AVX2__)
    sum = Sum(_mm256_add_epi32(__m256i(sum), _mm256_madd_epi16(__m256i(w), _mm256_set1_epi32(int32_t(a)))));
#else
    const Int8x32 low = Int8x32(w & 0xffffu), high = Int8x32(w >> 16);
    sum += low * int32_t(int16_t(a)) + high * int32_t(int16_t(a >> 16));
#endif
  }
  static void add(Sum& sum, const Weights& w, const Input& a) {
    add_pairs(sum, w.even, a.even);
    add_pairs(sum, w.odd, a.odd);
  }
};

template <class Dot>
struct PlainKernel {
  using Acc = typename Dot::Acc;
  using Sum = typename Dot::Sum;
  static constexpr int kRows = 4;
  static constexpr bool kDecodes = false;  // BF12 must be decoded before

  // One half of a block for R rows.
  template <int R>
  static void half(Acc* acc, const uint8_t* w, const uint8_t* a, int64_t lda) {
    Sum sum[R][2];
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < 2; ++i) load8(sum[r][i], acc + r * kPanel + i * 8);
    for (int s = 0; s < kSteps; ++s) {
      typename Dot::Weights weights[2];
      for (int i = 0; i < 2; ++i) {
        Word8 words;
        load8(words, w + s * 64 + i * 32);
        Dot::expand(weights[i], words);
      }
      for (int r = 0; r < R; ++r) {
        typename Dot::Input input;
        Dot::spread(input, load_word(a + r * lda + s * 4));
        for (int i = 0; i < 2; ++i) Dot::add(sum[r][i], weights[i], input);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < 2; ++i) std::memcpy(acc + r * kPanel + i * 8, &sum[r][i], 32);
  }

  template <int R>
  static void rows(Chunk& chunk) {
    auto* acc = static_cast<Acc*>(chunk.acc);
    if (chunk.first_block == 0) std::fill(acc, acc + R * kPanel, Acc(0));
    const uint8_t* a = chunk.a + chunk.first_block * 64;
    for (int b = 0; b < chunk.blocks; ++b, a += 64, chunk.w += kBlockBytes) {
      prefetch_ahead(chunk);
      for (int h = 0; h < 2; ++h) half<R>(acc + h * 16, chunk.w + h * 1024, a, chunk.lda);
    }
  }

  void operator()(Chunk chunk) {
    switch (chunk.rows) {
      case 1: return rows<1>(chunk);
      case 2: return rows<2>(chunk);
      case 3: return rows<3>(chunk);
      default: return rows<4>(chunk);
    }
  }
};

// I4 (stored as linear_int4.h says), all rows of a chunk on one unpacked quarter of a group at a time.
struct PlainInt4Kernel {
  using Acc = float;
  static constexpr int kRows = 4;
  static constexpr bool kDecodes = false;

  // 8 columns (part `i` of 4) of one group for R rows.
  template <int R>
  static void columns(const Chunk& chunk, const uint8_t* w, int i, int g) {
    Int8x32 dot[R];
    const uint8_t* a = chunk.a + int64_t(g) * kGroup4;
    const uint8_t* scales = chunk.a + round_up(size_t(chunk.all_blocks) * kGroup4, 64) + size_t(g) * 4;
    for (int r = 0; r < R; ++r)
      dot[r] = Int8x32{} + int32_t(load_word(scales + r * chunk.lda + size_t(chunk.all_blocks) * 4));
    for (int part = 0; part < 4; ++part) {
      Word8 both;
      load8(both, w + i / 2 * 256 + part * 64 + i % 2 * 32);
      PlainI8::Weights low, high;
      PlainI8::expand(low, both & 0x0f0f0f0fu);
      PlainI8::expand(high, (both >> 4) & 0x0f0f0f0fu);
      for (int r = 0; r < R; ++r) {
        PlainI8::Input first, second;
        PlainI8::spread(first, load_word(a + r * chunk.lda + part * 8));
        PlainI8::spread(second, load_word(a + r * chunk.lda + part * 8 + 4));
        PlainI8::add(dot[r], low, first);
        PlainI8::add(dot[r], high, second);
      }
    }
    auto* acc = static_cast<float*>(chunk.acc) + i * 8;
    for (int r = 0; r < R; ++r) {
      const float x = bits_float(load_word(scales + r * chunk.lda));
      for (int c = 0; c < 8; ++c) {
        uint16_t scale;
        std::memcpy(&scale, w + 512 + (i * 8 + c) * 2, 2);
        acc[r * kPanel + c] = madd(float(dot[r][c]), from_bf16(scale) * x, acc[r * kPanel + c]);
      }
    }
  }

  template <int R>
  static void rows(Chunk& chunk) {
    auto* acc = static_cast<float*>(chunk.acc);
    if (chunk.first_block == 0) std::fill(acc, acc + R * kPanel, 0.0f);
    for (int g = 0; g < chunk.blocks; ++g, chunk.w += kGroup4Bytes) {
      prefetch_ahead(chunk);
      for (int i = 0; i < 4; ++i) columns<R>(chunk, chunk.w, i, chunk.first_block + g);
    }
  }

  void operator()(Chunk chunk) {
    switch (chunk.rows) {
      case 1: return rows<1>(chunk);
      case 2: return rows<2>(chunk);
      case 3: return rows<3>(chunk);
      default: return rows<4>(chunk);
    }
  }
};

}  // namespace dspark
