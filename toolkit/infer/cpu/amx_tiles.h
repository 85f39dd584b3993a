// The CPU's tiles (AMX). TILES is defined if the compiler may use them.
//
// A tile has at most 16 lines of 64 bytes. _tile_dpbf16ps(c, a, b) adds a b to c: c [M, N] float32, a [M, 32] bfloat16,
// b [16, N, 2] bfloat16, pairs of inputs side by side.

#pragma once

#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#define TILES

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace {

constexpr int64_t LINES = 16, LINE = 64, SPAN = 2 * LINES;  // lines of a tile, bytes of a line, inputs of one product

// Linux lets a process use tiles only after the process has asked.
inline bool tiles_granted() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  return granted;
}

// The compiler does not see that tile instructions read and write memory.
inline void memory_is_read() { asm volatile("" ::: "memory"); }

// The shapes of this thread's tiles; the destructor releases the tiles.
class Tiles {
 public:
  void shape(int tile, int64_t lines, int64_t bytes) {
    shapes_.lines[tile] = lines;
    shapes_.bytes[tile] = bytes;
  }
  void use() {
    memory_is_read();
    _tile_loadconfig(&shapes_);
  }
  ~Tiles() { _tile_release(); }

 private:
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t lines[16] = {};
  } shapes_;
};

}  // namespace

#endif
