// AMX tile kernels (BF16 and I8) and the question whether this process may use tiles.
// Never assumes the permission: the operating system is asked once, and a refusal means the vector kernels.
#pragma once

#include <type_traits>

#include "linear_bf12.h"
#include "linear_rows.h"

#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && \
    defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define DSPARK_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace dspark {

#if defined(DSPARK_AMX)

inline bool has_amx() {
  constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool allowed = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  return allowed;
}

// Tiles 0..3 sum 2 x 2 parts of 16 rows and 16 columns; 4, 5 hold activations, 6, 7 weights.
class Tiles {
 public:
  ~Tiles() {
    if (rows_) _tile_release();
  }

  // Fewer rows in the tiles of sums and activations: unused rows cost nothing and touch no memory. Up to 16 rows, all
  // tiles of sums are alike.
  void shape(int rows, int steps) {
    if (rows == rows_) return;
    rows_ = rows;
    struct alignas(64) Config {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    const int top = std::min(rows, 16), bottom = rows > 16 ? rows - 16 : rows;
    const int counts[8] = {top, top, bottom, bottom, top, bottom, steps, steps};
    for (int t = 0; t < 8; ++t) {
      config.rows[t] = uint8_t(counts[t]);
      config.bytes[t] = uint16_t(t == 4 || t == 5 ? steps * 4 : 64);
    }
    // The intrinsic names only the first bytes of the configuration as its input.
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
  }

 private:
  int rows_ = 0;
};

// Blocks as they lie in memory.
template <bool Stream>
class PlainBlocks {
 public:
  explicit PlainBlocks(const Chunk& chunk) : chunk_(chunk), next_(chunk.w) {}

  const uint8_t* next() {
    if (Stream)
      for (int i = 0; i < kBlockBytes; i += 64) prefetch_stream(next_ + i);
    else
      prefetch_ahead(chunk_);
    const uint8_t* block = next_;
    next_ += kBlockBytes;
    return block;
  }

 private:
  Chunk chunk_;
  const uint8_t* next_;
};

// BF12 blocks, decoded two ahead of their use: a tile cannot be loaded from stores that have not left the core.
class DecodedBlocks {
 public:
  explicit DecodedBlocks(const Chunk& chunk) : chunk_(chunk), src_(chunk.w) {
    for (int b = 0; b < kAhead; ++b) decode();
  }

  const uint8_t* next() {
    decode();
    // The tile intrinsics do not tell the compiler that they read memory.
    asm volatile("" : : : "memory");
    return ring_[used_++ % kRing];
  }

 private:
  static constexpr int kAhead = 2, kRing = 4;

  void decode() {
    if (made_ == chunk_.blocks) return;
    src_ = bf12_decode_block(src_, chunk_.table, chunk_.flags[made_], ring_[made_ % kRing]);
    ++made_;
  }

  Chunk chunk_;
  const uint8_t* src_;
  int made_ = 0, used_ = 0;
  alignas(64) uint8_t ring_[kRing][kBlockBytes];
};

template <bool Int8>
struct AmxKernel {
  using Acc = std::conditional_t<Int8, int32_t, float>;
  static constexpr int kRows = 32;
  static constexpr bool kDecodes = true;
  Tiles tiles;

  void operator()(const Chunk& chunk) {
    tiles.shape(chunk.rows, kSteps);
    // The tile intrinsics do not tell the compiler that they read memory.
    asm volatile("" : : : "memory");
    if (chunk.table) with(chunk, DecodedBlocks(chunk));
    else if (chunk.ahead_lines == kStream) with(chunk, PlainBlocks<true>(chunk));
    else with(chunk, PlainBlocks<false>(chunk));
    asm volatile("" : : : "memory");
  }

  template <class Blocks>
  static void with(const Chunk& chunk, Blocks&& blocks) {
    chunk.rows > 16 ? tall(chunk, blocks) : flat(chunk, blocks);
  }

  template <class Blocks>
  static void flat(const Chunk& chunk, Blocks& blocks) {
    auto* acc = static_cast<uint8_t*>(chunk.acc);
    if (chunk.first_block) {
      _tile_loadd(0, acc, 128);
      _tile_loadd(1, acc + 64, 128);
    } else {
      _tile_zero(0);
      _tile_zero(1);
    }
    const uint8_t* a = chunk.a + chunk.first_block * 64;
    for (int b = 0; b < chunk.blocks; ++b, a += 64) {
      const uint8_t* w = blocks.next();
      _tile_loadd(4, a, chunk.lda);
      _tile_loadd(6, w, 64);
      _tile_loadd(7, w + 1024, 64);
      if constexpr (Int8) {
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
      } else {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
      }
    }
    _tile_stored(0, acc, 128);
    _tile_stored(1, acc + 64, 128);
  }

  template <class Blocks>
  static void tall(const Chunk& chunk, Blocks& blocks) {
    auto* acc = static_cast<uint8_t*>(chunk.acc);
    if (chunk.first_block) {
      _tile_loadd(0, acc, 128);
      _tile_loadd(1, acc + 64, 128);
      _tile_loadd(2, acc + 2048, 128);
      _tile_loadd(3, acc + 2048 + 64, 128);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    const uint8_t* a = chunk.a + chunk.first_block * 64;
    const uint8_t* below = a + 16 * chunk.lda;
    for (int b = 0; b < chunk.blocks; ++b, a += 64, below += 64) {
      const uint8_t* w = blocks.next();
      _tile_loadd(4, a, chunk.lda);
      _tile_loadd(6, w, 64);
      _tile_loadd(7, w + 1024, 64);
      _tile_loadd(5, below, chunk.lda);
      if constexpr (Int8) {
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
      } else {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, acc, 128);
    _tile_stored(1, acc + 64, 128);
    _tile_stored(2, acc + 2048, 128);
    _tile_stored(3, acc + 2048 + 64, 128);
  }
};

#else

inline bool has_amx() { return false; }

#endif

}  // namespace dspark
