// The AMX kernel of I4, for more than a few rows.
// Never differs from the vector kernel in a bit: group sums are exact integers, and the float sum has the same order.
//
// Three stages work on different pairs of groups at once, because a tile can neither be loaded from stores nor read
// back by vectors before they have left the core: unpack pair p, multiply pair p - 1, add pair p - 2 to the sums.
#pragma once

#include "linear_amx.h"
#include "linear_int4.h"

#if defined(DSPARK_AMX)

namespace dspark {

class Int4AmxKernel {
 public:
  using Acc = float;
  static constexpr int kRows = 32;
  static constexpr bool kDecodes = false;

  void operator()(Chunk chunk) {
    tiles_.shape(chunk.rows, kGroup4 / 4);
    if (chunk.first_block == 0) std::memset(chunk.acc, 0, size_t(chunk.rows) * kPanel * 4);
    asm volatile("" : : : "memory");
    chunk.rows > 16 ? walk<true>(chunk) : walk<false>(chunk);
    asm volatile("" : : : "memory");
  }

 private:
  static constexpr int kRing = 4;

  template <bool Tall>
  void walk(Chunk& chunk) {
    const int pairs = (chunk.blocks + 1) / 2;
    for (int p = 0; p < pairs + 2; ++p) {
      for (int g = 2 * p; g < std::min(2 * p + 2, chunk.blocks); ++g) {
        if (chunk.ahead_lines == kStream)
          for (int i = 0; i < kGroup4Bytes; i += 64) prefetch_stream(chunk.w + g * kGroup4Bytes + i);
        else
          prefetch_ahead(chunk);
        unpack(chunk.w + g * kGroup4Bytes, wide_[g % kRing]);
      }
      // The tile intrinsics do not tell the compiler that they read memory.
      asm volatile("" : : : "memory");
      for (int g = std::max(0, 2 * p - 2); g < std::min(2 * p, chunk.blocks); ++g) multiply<Tall>(chunk, g);
      if (p < 2) continue;
      const int first = 2 * p - 4;
      first + 2 <= chunk.blocks ? add<2>(chunk, first) : add<1>(chunk, first);
    }
  }

  // 512 bytes of nibbles -> two tiles of 8 steps of signed bytes.
  static void unpack(const uint8_t* w, uint8_t* wide) {
    const __m512i low = _mm512_set1_epi8(15), eight = _mm512_set1_epi8(8);
    for (int i = 0; i < 8; ++i) {
      const __m512i both = _mm512_loadu_si512(w + i * 64);
      const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
      _mm512_store_si512(wide + i * 128, _mm512_sub_epi8(_mm512_and_si512(both, low), eight));
      _mm512_store_si512(wide + i * 128 + 64, _mm512_sub_epi8(high, eight));
    }
  }

  // Flat products alternate between two pairs of tiles, so that one group need not wait for the last.
  template <bool Tall>
  void multiply(const Chunk& chunk, int g) {
    const uint8_t* a = chunk.a + int64_t(chunk.first_block + g) * kGroup4;
    const uint8_t* wide = wide_[g % kRing];
    auto* dot = reinterpret_cast<uint8_t*>(dot_[g % kRing]);
    _tile_loadd(4, a, chunk.lda);
    _tile_loadd(6, wide, 64);
    _tile_loadd(7, wide + 512, 64);
    if (Tall || g % 2 == 0) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
      _tile_stored(0, dot, 128);
      _tile_stored(1, dot + 64, 128);
    } else {
      _tile_zero(2);
      _tile_zero(3);
      _tile_dpbssd(2, 4, 6);
      _tile_dpbssd(3, 4, 7);
      _tile_stored(2, dot, 128);
      _tile_stored(3, dot + 64, 128);
    }
    if (!Tall) return;
    _tile_loadd(5, a + 16 * chunk.lda, chunk.lda);
    _tile_zero(2);
    _tile_zero(3);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
    _tile_stored(2, dot + 2048, 128);
    _tile_stored(3, dot + 2048 + 64, 128);
  }

  // Groups g .. g + Count - 1, in this order.
  template <int Count>
  void add(const Chunk& chunk, int g) {
    __m512 scale[Count][2];
    for (int i = 0; i < Count; ++i) int4_scales(chunk.w + (g + i) * kGroup4Bytes, scale[i]);
    auto* acc = static_cast<float*>(chunk.acc);
    const uint8_t* a = chunk.a + round_up(size_t(chunk.all_blocks) * kGroup4, 64) + size_t(chunk.first_block + g) * 4;
    for (int r = 0; r < chunk.rows; ++r, a += chunk.lda, acc += kPanel) {
      float x[Count];
      std::memcpy(x, a, sizeof x);
      for (int h = 0; h < 2; ++h) {
        __m512 sum = _mm512_loadu_ps(acc + h * 16);
        for (int i = 0; i < Count; ++i) {
          const __m512 dot = _mm512_cvtepi32_ps(_mm512_load_si512(dot_[(g + i) % kRing] + r * kPanel + h * 16));
          sum = _mm512_fmadd_ps(dot, _mm512_mul_ps(scale[i][h], _mm512_set1_ps(x[i])), sum);
        }
        _mm512_storeu_ps(acc + h * 16, sum);
      }
    }
  }

  Tiles tiles_;
  alignas(64) uint8_t wide_[kRing][1024];
  alignas(64) int32_t dot_[kRing][kRows * kPanel];
};

}  // namespace dspark

#endif
