// C doors of the linear layers for ctypes; include once, in one translation unit.
// Never keeps anything between calls: what a call needs, it allocates and frees.
#pragma once

#include <cstdlib>

#include "linear.h"
#include "linear_codes.h"

extern "C" {

// "amx", "avx512" or "portable".
const char* dspark_linear_isa() { return dspark::isa(); }

// Bytes to allocate for a blob, or 0 when the kind or shape makes no sense.
size_t dspark_packed_bytes(int32_t kind, int64_t n, int64_t k) {
  if (kind < dspark::F32 || kind > dspark::I4 || n < 1 || k < 1) return 0;
  return dspark::packed_bytes(kind, n, k);
}

// Returns the bytes used.
size_t dspark_pack(int32_t kind, int64_t n, int64_t k, const void* weight, void* blob, int32_t threads) {
  return dspark::pack(kind, n, k, weight, blob, threads);
}

// Row-major codes and scales, as linear_codes.h says, of weight [n, k]; kinds I8 and I4.
void dspark_quantise(int32_t kind, int64_t n, int64_t k, int32_t group, const float* weight, void* codes, void* scales,
                     int32_t threads) {
  dspark::quantise(kind, n, k, group, weight, codes, scales, threads);
}

// As dspark_pack, from codes and scales. Returns the bytes used.
size_t dspark_pack_codes(int32_t kind, int64_t n, int64_t k, int32_t group, const void* codes, const void* scales,
                         void* blob, int32_t threads) {
  return dspark::pack_codes(kind, n, k, group, codes, scales, blob, threads);
}

// out[rows, n] = x[rows, k] * W^T (+ bias), contiguous rows, bias may be null. Returns 0, or 1 when memory is short.
int32_t dspark_linear(const void* blob, int32_t kind, int64_t n, int64_t k, const float* bias, const float* x,
                      int32_t rows, float* out, int32_t threads) {
  using namespace dspark;
  const Linear linear = view(kind, n, k, blob, bias);
  const size_t stride = prepared_bytes(kind, k), scratch = round_up(scratch_bytes(kind, k, rows), 64);
  auto* memory = static_cast<uint8_t*>(std::aligned_alloc(64, stride * rows + scratch * threads + 64));
  if (!memory) return 1;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int r = 0; r < rows; ++r) prepare_row(linear, x + r * k, memory + r * stride);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int t = 0; t < threads; ++t)
    run(linear, memory, rows, out, n, false, t, threads, memory + stride * rows + scratch * t);
  std::free(memory);
  return 0;
}

}  // extern "C"
