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
typedef int16_t Half16 __attribute__((vector_size(32)));

template <class Vector>
inline void load8(Vector& v, const void* p) { std::memcpy(&v, p, sizeof v); }

inline uint32_t load_word(const void* p) {
  uint32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

// The same word in all lanes. Said so that the compiler loads it thus, and takes it apart there rather than before.
inline Word8 spread_word(const void* p) {
#if defined(__AVX2__)
  return Word8(_mm256_broadcast_ss(static_cast<const float*>(p)));
#else
  return Word8{} + load_word(p);
#endif
}

// Both parts of a step in turn (bfloat16: even and odd inputs; int8: bytes 0 and 2, then 1 and 3): what a part takes of
// a word of weights, for all rows, and of a word of activations, for all columns.
struct PlainF32 {
  using Acc = float;
  using Sum = Float8;
  static constexpr int kParts = 1, kRows = 6;  // 12 sums fill the registers
  template <int Part>
  static Float8 weight(const Word8& w) { return Float8(w); }
  template <int Part>
  static Float8 input(const Word8& a) { return Float8(a); }
  static void add(Sum& sum, const Float8& w, const Float8& a) { sum = w * a + sum; }
};

// Products of two bfloat16 are exact in float32, so fused or not makes no difference.
struct PlainBf16 : PlainF32 {
  static constexpr int kParts = 2, kRows = 4;  // 12 sums and what takes words apart do not fit
  template <int Part>
  static Float8 weight(const Word8& w) { return Float8(Part ? w & 0xffff0000u : w << 16); }  // the bits, not their values
  template <int Part>
  static Float8 input(const Word8& a) { return weight<Part>(a); }
};

// Unsigned weight bytes times signed activation bytes, both as 16-bit pairs, exact in int32.
struct PlainI8 {
  using Acc = int32_t;
  using Sum = Int8x32;
  static constexpr int kParts = 2, kRows = 4;
  template <int Part>
  static Word8 weight(const Word8& w) { return (Part ? w >> 8 : w) & 0x00ff00ffu; }
  template <int Part>
  static Word8 input(const Word8& a) {
    const Half16 pairs = Half16(a);
    return Word8(Part ? pairs >> 8 : (pairs << 8) >> 8);
  }
  static void add(Sum& sum, const Word8& w, const Word8& a) {
#if defined(__AVX2__)
    sum = Sum(_mm256_add_epi32(__m256i(sum), _mm256_madd_epi16(__m256i(w), __m256i(a))));
#else
    const Int8x32 low = Int8x32(w & 0xffffu) * (Int8x32(a << 16) >> 16);
    sum += low + Int8x32(w >> 16) * (Int8x32(a) >> 16);
#endif
  }
};

template <class Dot>
struct PlainKernel {
  using Acc = typename Dot::Acc;
  using Sum = typename Dot::Sum;
  static constexpr int kRows = Dot::kRows;
  static constexpr bool kDecodes = false;  // BF12 must be decoded before

  // One part of a step for R rows and C vectors of columns, which begin at `w`, the second pair of them a half further.
  template <int Part, int R, int C>
  static void part(Sum (&sum)[R][C], const uint8_t* w, const uint8_t* a, int64_t lda) {
    decltype(Dot::template weight<Part>(Word8{})) weights[C];
    for (int i = 0; i < C; ++i) {
      Word8 words;
      load8(words, w + i / 2 * 1024 + i % 2 * 32);
      weights[i] = Dot::template weight<Part>(words);
    }
    for (int r = 0; r < R; ++r) {
      const auto input = Dot::template input<Part>(spread_word(a + r * lda));
      for (int i = 0; i < C; ++i) Dot::add(sum[r][i], weights[i], input);
    }
  }

  // 8 C columns of one block for R rows.
  template <int R, int C>
  static void columns(Sum (&sum)[R][C], const uint8_t* w, const uint8_t* a, int64_t lda) {
    for (int s = 0; s < kSteps; ++s, w += 64, a += 4) {
      part<0>(sum, w, a, lda);
      if constexpr (Dot::kParts == 2) part<1>(sum, w, a, lda);
    }
  }

  // All columns at once, which is more sums that do not wait for each other.
  template <int R>
  static void few_rows(Chunk& chunk, Acc* acc, const uint8_t* a) {
    Sum sum[R][4] = {};
    if (chunk.first_block) std::memcpy(sum, acc, sizeof sum);
    const bool streams = chunk.ahead_lines == kStream;
    for (int b = 0; b < chunk.blocks; ++b, a += 64, chunk.w += kBlockBytes) {
      prefetch_ahead(chunk);
      if (streams)
        for (int i = 0; i < kBlockBytes; i += 64) prefetch_stream(chunk.w + i);
      columns(sum, chunk.w, a, chunk.lda);
    }
    std::memcpy(acc, sum, sizeof sum);
  }

  // Half by half of each block, so that weights are read in the order in which they lie.
  template <int R>
  static void many_rows(Chunk& chunk, Acc* acc, const uint8_t* a) {
    Sum sums[2][R][2] = {};
    if (chunk.first_block)
      for (int r = 0; r < R; ++r)
        for (int h = 0; h < 2; ++h) std::memcpy(sums[h][r], acc + r * kPanel + h * 16, 64);
    for (int b = 0; b < chunk.blocks; ++b, a += 64, chunk.w += kBlockBytes) {
      prefetch_ahead(chunk);
      for (int h = 0; h < 2; ++h) {
        Sum sum[R][2];
        std::memcpy(sum, sums[h], sizeof sum);
        columns(sum, chunk.w + h * 1024, a, chunk.lda);
        std::memcpy(sums[h], sum, sizeof sum);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int h = 0; h < 2; ++h) std::memcpy(acc + r * kPanel + h * 16, sums[h][r], 64);
  }

  template <int R>
  static void rows(Chunk& chunk) {
    auto* acc = static_cast<Acc*>(chunk.acc);
    const uint8_t* a = chunk.a + chunk.first_block * 64;
    if constexpr (R <= 2) few_rows<R>(chunk, acc, a);
    else many_rows<R>(chunk, acc, a);
  }

  void operator()(Chunk chunk) {
    switch (chunk.rows) {
      case 1: return rows<1>(chunk);
      case 2: return rows<2>(chunk);
      case 3: return rows<3>(chunk);
      case 4: return rows<4>(chunk);
      case 5: return rows<5>(chunk);
      default: return rows<6>(chunk);
    }
  }
};

// I4 (stored as linear_int4.h says), all rows of a chunk on one unpacked quarter of a group at a time.
struct PlainInt4Kernel {
  using Acc = float;
  static constexpr int kRows = 4;
  static constexpr bool kDecodes = false;

  static void add_words(Int8x32& dot, const Word8& w, const Word8& a) {
    PlainI8::add(dot, PlainI8::weight<0>(w), PlainI8::input<0>(a));
    PlainI8::add(dot, PlainI8::weight<1>(w), PlainI8::input<1>(a));
  }

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
      const Word8 low = both & 0x0f0f0f0fu, high = (both >> 4) & 0x0f0f0f0fu;
      for (int r = 0; r < R; ++r) {
        add_words(dot[r], low, spread_word(a + r * chunk.lda + part * 8));
        add_words(dot[r], high, spread_word(a + r * chunk.lda + part * 8 + 4));
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
