// Activation rows in the form that a kind of weights wants, and small number helpers.
// Never looks at more than one row: every scale belongs to one row or to a part of it.
#pragma once

#include "linear.h"

namespace dspark {

inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float bits_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Round to nearest even; not-a-number stays one.
inline uint16_t to_bf16(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded);
}

inline float from_bf16(uint16_t bits) { return bits_float(uint32_t(bits) << 16); }

// a * b + c, always with the same rounding: the compiler must not choose for itself in one loop and not in another.
inline float madd(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// Nearest integer (ties to even) for |value| < 2^22, without library calls, so that loops vectorise.
inline int32_t round_int(float value) { return int32_t(float_bits(value + 12582912.0f)) - 0x4b400000; }

// The same of a * b, rounded once where there is a fused product: the compiler must not choose here either.
inline int32_t round_product(float a, float b) { return int32_t(float_bits(madd(a, b, 12582912.0f))) - 0x4b400000; }

// Largest magnitude, as bits: integer maxima vectorise without relaxed float rules, and a NaN wins.
inline uint32_t max_abs_bits(const float* x, int64_t count) {
  int32_t top = 0;
  for (int64_t i = 0; i < count; ++i) top = std::max(top, int32_t(float_bits(x[i]) & 0x7fffffffu));
  return uint32_t(top);
}

// Bytes of the quantised or rounded values of one row, zero padded to whole blocks.
inline size_t row_value_bytes(int32_t kind, int64_t k) { return size_t(num_blocks(kind, k)) * (kind == I4 ? 32 : 64); }

// Bytes from one prepared row to the next. An odd number of cache lines, so that rows do not share cache sets.
inline size_t prepared_bytes(int32_t kind, int64_t k) {
  size_t bytes = round_up(row_value_bytes(kind, k), 64);
  if (kind == I8) bytes += 64;                                         // scale and -128 * sum
  if (kind == I4) bytes += round_up(size_t(num_blocks(kind, k)) * 8, 64);  // scale and -8 * sum of each group
  return bytes / 64 % 2 ? bytes : bytes + 64;
}

// x[i] -> int8 with one scale; returns the scale. Values that are not finite make it NaN, and so the outputs.
inline float quantise_int8(const float* x, int64_t count, int8_t* q, int32_t* sum) {
  const uint32_t top = max_abs_bits(x, count);
  const bool finite = top < 0x7f800000u;
  const float largest = bits_float(top);
  // Below 2^-120 the reciprocal would overflow; such rows count as zero.
  const float inverse = finite && largest > 7.5e-37f ? 127.0f / largest : 0.0f;
  int32_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t value = finite ? round_product(x[i], inverse) : 0;
    q[i] = int8_t(value);
    total += value;
  }
  *sum = total;
  return finite ? (inverse > 0.0f ? largest / 127.0f : 0.0f) : bits_float(0x7fc00000u);
}

struct Int8Tail { float scale; int32_t correction; };

inline void prepare_int4(const Linear& linear, const float* x, uint8_t* dst) {
  const size_t values = round_up(row_value_bytes(I4, linear.k), 64);
  auto* q = reinterpret_cast<int8_t*>(dst);
  auto* scale = reinterpret_cast<float*>(dst + values);
  auto* correction = reinterpret_cast<int32_t*>(scale + linear.blocks);
  for (int g = 0; g < linear.blocks; ++g) {
    const int count = std::min(kGroup4, linear.k - g * kGroup4);
    if (count < kGroup4) std::memset(q + g * kGroup4, 0, kGroup4);
    int32_t sum;
    scale[g] = quantise_int8(x + int64_t(g) * kGroup4, count, q + g * kGroup4, &sum);
    correction[g] = -8 * sum;
  }
}

// x[K] -> dst[prepared_bytes]; dst aligned to 64 bytes. BF16 and BF12 round to bfloat16; I8 quantises with one scale
// for the row, I4 with one for each group of 32 (an outlier then costs its own group only).
inline void prepare_row(const Linear& linear, const float* x, void* dst) {
  auto* out = static_cast<uint8_t*>(dst);
  const int64_t k = linear.k;
  const size_t values = row_value_bytes(linear.kind, k);
  if (linear.kind == F32) {
    std::memcpy(out, x, size_t(k) * 4);
    std::memset(out + k * 4, 0, values - size_t(k) * 4);
  } else if (linear.kind == I8) {
    Int8Tail tail;
    int32_t sum;
    tail.scale = quantise_int8(x, k, reinterpret_cast<int8_t*>(out), &sum);
    tail.correction = -128 * sum;
    std::memset(out + k, 0, values - size_t(k));
    std::memcpy(out + values, &tail, sizeof tail);
  } else if (linear.kind == I4) {
    prepare_int4(linear, x, out);
  } else {
    auto* rounded = reinterpret_cast<uint16_t*>(out);
    for (int64_t i = 0; i < k; ++i) rounded[i] = to_bf16(x[i]);
    std::memset(out + k * 2, 0, values - size_t(k) * 2);
  }
}

}  // namespace dspark
