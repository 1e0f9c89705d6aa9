// BF12: bfloat16 weights stored without loss in about 12 bits.
// Never approximates: a part that holds an exponent outside the panel's table of 16 is stored as it is.
//
// A quad (4 steps of 32 weights) is 64 bytes of nibbles and 4 x 32 bytes of sign and mantissa. Word i of the nibbles
// holds the table indices of weight i of the four steps, lowest first. A raw quad is the 256 bytes of bfloat16.
#pragma once

#include "linear.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace dspark {

constexpr int kQuadBytes = 192;
constexpr int kRawQuadBytes = 256;

// One quad -> 256 bytes of bfloat16.
inline void bf12_decode_quad(const uint8_t* src, const uint16_t* table, uint8_t* dst) {
#if defined(__AVX512BW__)
  const __m512i exponents = _mm512_loadu_si512(table);
  const __m512i nibbles = _mm512_loadu_si512(src);
  const __m512i keep = _mm512_set1_epi16(short(0x807f));
  const auto step = [&](const __m512i index, int j) {
    const __m512i sm = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 64 + 32 * j)));
    // The table repeats after 16 entries, so bit 4 of an index (of the next nibble) does not matter.
    const __m512i exponent = _mm512_permutexvar_epi16(index, exponents);
    _mm512_storeu_si512(dst + 64 * j, _mm512_ternarylogic_epi32(sm, keep, exponent, 0xea));  // (sm & keep) | exponent
  };
  step(nibbles, 0);
  step(_mm512_srli_epi16(nibbles, 4), 1);
  step(_mm512_srli_epi16(nibbles, 8), 2);
  step(_mm512_srli_epi16(nibbles, 12), 3);
#elif defined(__AVX2__)
  const __m256i words = _mm256_srli_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(table)), 7);
  const __m256i exponents = _mm256_permute4x64_epi64(_mm256_packus_epi16(words, words), 0x88);  // 16 bytes, twice
  const __m256i keep = _mm256_set1_epi16(short(0x807f)), low = _mm256_set1_epi16(15), byte = _mm256_set1_epi16(255);
  for (int part = 0; part < 2; ++part) {
    __m256i nibbles = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 32 * part));
    for (int j = 0; j < 4; ++j, nibbles = _mm256_srli_epi16(nibbles, 4)) {
      const __m256i found = _mm256_shuffle_epi8(exponents, _mm256_and_si256(nibbles, low));
      const __m256i exponent = _mm256_slli_epi16(_mm256_and_si256(found, byte), 7);
      const auto* sm = reinterpret_cast<const __m128i*>(src + 64 + 32 * j + 16 * part);
      const __m256i rest = _mm256_and_si256(_mm256_cvtepi8_epi16(_mm_loadu_si128(sm)), keep);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + 64 * j + 32 * part), _mm256_or_si256(rest, exponent));
    }
  }
#else
  for (int j = 0; j < 4; ++j) {
    for (int i = 0; i < 32; ++i) {
      const unsigned nibbles = unsigned(src[2 * i]) | unsigned(src[2 * i + 1]) << 8;
      const unsigned sm = src[64 + 32 * j + i];
      const unsigned word = (sm & 0x80u) << 8 | (sm & 0x7fu) | table[nibbles >> (4 * j) & 15u];
      dst[64 * j + 2 * i] = uint8_t(word);
      dst[64 * j + 2 * i + 1] = uint8_t(word >> 8);
    }
  }
#endif
}

// Decode one block into `dst` (2048 bytes); returns where the next block starts.
inline const uint8_t* bf12_decode_block(const uint8_t* src, const uint16_t* table, uint8_t raw, uint8_t* dst) {
  for (int quad = 0; quad < kQuads; ++quad, dst += kRawQuadBytes) {
    for (int i = 0; i < kQuadBytes; i += 64) prefetch_stream(src + i);
    if (__builtin_expect(raw >> quad & 1, 0)) {
      std::memcpy(dst, src, kRawQuadBytes);
      src += kRawQuadBytes;
    } else {
      bf12_decode_quad(src, table, dst);
      src += kQuadBytes;
    }
  }
  return src;
}

// The same for `blocks` blocks with one flag byte each.
inline const uint8_t* bf12_decode(const uint8_t* src, const uint16_t* table, const uint8_t* flags, int blocks,
                                  uint8_t* dst) {
  for (int b = 0; b < blocks; ++b) src = bf12_decode_block(src, table, flags[b], dst + size_t(b) * kBlockBytes);
  return src;
}

// The 16 most frequent exponents of a panel, twice, shifted to bits 7..14; `index`: from exponent to entry, or 255.
inline void bf12_table(const uint16_t* panel, int64_t count, uint16_t* table, uint8_t* index) {
  uint32_t seen[4][256] = {};
  for (int64_t i = 0; i < count; i += 4)
    for (int j = 0; j < 4; ++j) ++seen[j][panel[i + j] >> 7 & 255];
  for (int e = 0; e < 256; ++e) seen[0][e] += seen[1][e] + seen[2][e] + seen[3][e];
  std::memset(index, 255, 256);
  for (int entry = 0; entry < 16; ++entry) {
    int best = 0;
    for (int e = 1; e < 256; ++e)
      if (seen[0][e] > seen[0][best]) best = e;
    if (seen[0][best] == 0) best = entry ? table[0] >> 7 : 0;
    if (index[best] == 255) index[best] = uint8_t(entry);
    seen[0][best] = 0;
    table[entry] = table[entry + 16] = uint16_t(best << 7);
  }
}

// Which quads of a block must stay raw, as bits.
inline uint8_t bf12_raw_quads(const uint16_t* block, const uint8_t* index) {
  unsigned raw = 0;
  for (int quad = 0; quad < kQuads; ++quad) {
    uint8_t worst = 0;
    for (int i = 0; i < 128; ++i) worst = std::max(worst, index[block[quad * 128 + i] >> 7 & 255]);
    raw |= unsigned(worst == 255) << quad;
  }
  return uint8_t(raw);
}

inline size_t bf12_block_bytes(uint8_t raw) {
  return kQuads * kQuadBytes + size_t(__builtin_popcount(raw)) * (kRawQuadBytes - kQuadBytes);
}

// One block of bfloat16 -> its stored form; returns where the next block goes.
inline uint8_t* bf12_encode(const uint16_t* block, const uint8_t* index, uint8_t raw, uint8_t* dst) {
  for (int quad = 0; quad < kQuads; ++quad) {
    const uint16_t* src = block + quad * 128;
    if (raw >> quad & 1) {
      std::memcpy(dst, src, kRawQuadBytes);
      dst += kRawQuadBytes;
      continue;
    }
    for (int i = 0; i < 32; ++i) {
      unsigned nibbles = 0;
      for (int j = 0; j < 4; ++j) nibbles |= unsigned(index[src[32 * j + i] >> 7 & 255]) << (4 * j);
      dst[2 * i] = uint8_t(nibbles);
      dst[2 * i + 1] = uint8_t(nibbles >> 8);
    }
    for (int i = 0; i < 128; ++i) dst[64 + i] = uint8_t((src[i] >> 8 & 0x80) | (src[i] & 0x7f));
    dst += kQuadBytes;
  }
  return dst;
}

}  // namespace dspark
