// y = x w^T + b for few rows of x, as in a decoding step, which reads every weight of the model once; for the threads of
// a team.
//
// Weights are stored in blocks of WIDTH outputs; a block is contiguous memory:
//
//     bfloat16  w [ceil(N / WIDTH), K / 2, WIDTH, 2]   pairs of inputs side by side, as 32-bit words:
//                                                      low half: input 2p, high half: input 2p+1 of one output
//     int8      w [ceil(N / WIDTH), K, WIDTH, 1]       y = (x w^T) * scale + b, one scale per output
//               w [ceil(N / WIDTH), K / 2, WIDTH, 2]   for tiles: pairs of inputs side by side, as bytes
//
// The product of two bfloat16 is exact in float32. Sums are float32, and their order depends on K alone: the order of
// the inputs, or that of the CPU's instructions for pairs (AVX512-BF16 adds both products of a pair to a sum, AMX the
// even and the odd ones of 32 inputs, then both). A row's result does not depend on the other rows, nor on the number
// of threads. In pairs, numbers below 1.2e-38 count as 0. With int8 weights in tiles, products below 3.3e-24 count as 0
// too, and inputs from 1.8e19 on become infinite.
//
// Shapes: M rows, N outputs, K inputs (a multiple of 4; with tiles a multiple of 32).

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "amx_tiles.h"
#include "vectors.h"

namespace {

#if defined(__AVX512F__)
constexpr int ROWS_A_PASS = 12;  // 24 sums, 2 weights and an input fit into 32 registers
#else
constexpr int ROWS_A_PASS = 6;  // 12 sums, 2 weights, an input and a mask fit into 16 registers
#endif
#if defined(__AVX512BF16__)
typedef bf16 Input;  // of the rows, as they are multiplied: in pairs
#else
typedef float Input;
#endif
constexpr int WIDTH = 2 * LANES;
constexpr int64_t ROWS_A_PANEL = 512;  // inputs that stay in the L2 cache, results whose pages stay in the TLB
constexpr int64_t AHEAD = 8192;  // bytes to prefetch: the core's prefetcher stops at the end of a page

inline Words words_at(const char* at) {
  Words words;
  memcpy(&words, at, sizeof words);
  return words;
}

// The weights of INPUTS inputs and WIDTH outputs take 4 * WIDTH bytes. Those of the second LANES outputs are HIGH bytes
// after those of the first. load: the weights of one input and LANES outputs; pairs: of two, as pairs of bfloat16.
struct Bfloat16 {
  static constexpr int INPUTS = 2, HIGH = 4 * LANES;

  static Words pairs(const char* at, int) { return words_at(at); }

  static Floats load(const char* at, int input) {
    const Words words = words_at(at);
    return (Floats)(input ? words & 0xffff0000u : words << 16);
  }
};

struct Int8 {
  static constexpr int INPUTS = 4, HIGH = LANES;

  static Words pairs(const char* at, int input) {  // exact: a level has at most 8 bits
    return (Words)load(at, input) >> 16 | (Words)load(at, input + 1);
  }

  static Floats load(const char* at, int input) {
    at += input * WIDTH;
#if defined(__AVX512F__)  // GCC converts byte by byte
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
#else
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
#endif
  }
};

// Where a block's sums go: `count` columns of y [.., N], after scales and biases, if any. unit: a factor of the scales.
// residual [.., N]: what the rounded results are added to, or null.
struct End {
  bf16* y;
  int64_t N, count;
  const float* scale;
  const bf16* bias;
  float unit;
  const bf16* residual;

  End from_row(int64_t m) const {
    End end = *this;
    end.y += m * N;
    if (residual) end.residual += m * N;
    return end;
  }
};

// COUNT: `count` as a constant for the compiler, or 0 if it is not constant.
template <int COUNT>
inline void finish_some(const End& end, int64_t row, int64_t from, int64_t count, Floats sums) {
  if (COUNT) count = COUNT;
  Floats values = {};
  if (end.scale) {
    memcpy(&values, end.scale + from, 4 * count);
    sums *= values * end.unit;
  }
  if (end.bias) {
    Halves biases = {};
    memcpy(&biases, end.bias + from, 2 * count);
    sums += (Floats)(__builtin_convertvector(biases, Words) << 16);
  }
  if (end.residual) {
    Halves earlier = {};
    memcpy(&earlier, end.residual + row * end.N + from, 2 * count);
    sums = (Floats)(__builtin_convertvector(earlier, Words) << 16) + rounded_to_bf16(sums);
  }
  store(end.y + row * end.N + from, sums, count);
}

inline void finish(const End& end, int64_t row, int64_t from, Floats sums) {
  const int64_t count = end.count - from;
  if (count >= LANES)
    finish_some<LANES>(end, row, from, LANES, sums);
  else if (count > 0)
    finish_some<0>(end, row, from, count, sums);
}

// Adds the products of INPUTS inputs of ROWS rows x [.., K] with the weights at `w` to the sums of WIDTH outputs.
#if defined(__AVX512BF16__)
template <typename Weights, int ROWS>
inline void add_products(const char* w, const Input* x, int64_t K, Floats* low, Floats* high) {
  for (int i = 0; i < Weights::INPUTS; i += 2) {
    const __m512bh low_weights = (__m512bh)Weights::pairs(w, i);
    const __m512bh high_weights = (__m512bh)Weights::pairs(w + Weights::HIGH, i);
    for (int m = 0; m < ROWS; m++) {
      int pair;
      memcpy(&pair, x + m * K + i, sizeof pair);
      const __m512bh inputs = (__m512bh)_mm512_set1_epi32(pair);
      low[m] = (Floats)_mm512_dpbf16_ps((__m512)low[m], low_weights, inputs);
      high[m] = (Floats)_mm512_dpbf16_ps((__m512)high[m], high_weights, inputs);
    }
  }
}
#else
template <typename Weights, int ROWS>
inline void add_products(const char* w, const Input* x, int64_t K, Floats* low, Floats* high) {
  for (int i = 0; i < Weights::INPUTS; i++) {
    const Floats low_weights = Weights::load(w, i), high_weights = Weights::load(w + Weights::HIGH, i);
    for (int m = 0; m < ROWS; m++) {
      const float input = x[m * K + i];
      low[m] += low_weights * input;
      high[m] += high_weights * input;
    }
  }
}
#endif

// Multiplies ROWS rows x [.., K] with one block of weights.
template <typename Weights, int ROWS>
void multiply(const char* w, const Input* x, int64_t K, const End& end) {
  constexpr int64_t BYTES = 4 * WIDTH;
  Floats low[ROWS], high[ROWS];  // outputs 0 .. LANES-1 and LANES .. WIDTH-1
  for (int m = 0; m < ROWS; m++) low[m] = high[m] = Floats{};
  for (int64_t k = 0; k < K; k += Weights::INPUTS, w += BYTES) {
    for (int64_t line = 0; line < BYTES; line += 64) __builtin_prefetch(w + AHEAD + line);
    add_products<Weights, ROWS>(w, x + k, K, low, high);
  }
  for (int m = 0; m < ROWS; m++) {
    finish(end, m, 0, low[m]);
    finish(end, m, LANES, high[m]);
  }
}

#if defined(TILES)

// Tiles 0-3: sums, 16x16. Tiles 4, 5: x, 16x32. Tiles 6, 7: weights, 16 pairs x 16. rows: at most 2 * LINES.
inline void shape_tiles(Tiles& tiles, int64_t rows) {
  const int64_t first = rows < LINES ? rows : LINES;
  const int64_t second = rows >= 2 * LINES ? LINES : rows > LINES ? rows - LINES : 1;
  for (int tile = 0; tile < 8; tile++)
    tiles.shape(tile, tile >= 6 ? LINES : tile == 2 || tile == 3 || tile == 5 ? second : first, LINE);
  tiles.use();
}

// pairs: the weights of SPAN inputs and WIDTH outputs at `w` as pairs of bfloat16; int8 is converted into `room`.
// THERE: whether tiles support weights of this type. LOWERED: factor on the weights. RAISED: factor on the inputs,
// against underflow.
template <typename Weights>
struct Paired;

template <>
struct Paired<Bfloat16> {
  static constexpr bool THERE = true;
  static constexpr float LOWERED = 1, RAISED = 1;
  static const char* pairs(const char* w, char*) { return w; }
};

template <>
struct Paired<Int8> {
  static constexpr float LOWERED = 0x1p-112f, RAISED = 0x1p64f;
#if defined(__AVX512FP16__)
  static constexpr bool THERE = true;
  static const char* pairs(const char* w, char* room) {
    // int8 -> float16 -> bfloat16. The exponent keeps float16's bias, so that the result is 2^112 times smaller.
    const __m512i kept = _mm512_set1_epi16(int16_t(0x8fff));
    for (int64_t half = 0; half < 2 * LINES; half++, w += LINE / 2) {
      const __m512i levels = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w)));
      const __m512i narrow = _mm512_castph_si512(_mm512_cvtepi16_ph(levels));
      _mm512_storeu_si512(room + half * LINE, _mm512_and_si512(_mm512_srai_epi16(narrow, 3), kept));
    }
    return room;
  }
#else
  static constexpr bool THERE = false;
  static const char* pairs(const char*, char* room) { return room; }
#endif
};

// Multiplies `rows` rows, for which the tiles are shaped, with one block. SECOND: rows > LINES. ahead: prefetch. The
// results of the first `done` rows are there already.
template <typename Weights, bool SECOND>
void multiply_tiles(const char* w, const bf16* x, int64_t K, int64_t rows, bool ahead, int64_t done, const End& end) {
  alignas(64) char room[2][SPAN * 2 * WIDTH];
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  constexpr int64_t STEP = SPAN / Weights::INPUTS * 4 * WIDTH;  // bytes of SPAN inputs
  const char* next = Paired<Weights>::pairs(w, room[0]);
  for (int64_t k = 0; k < K; k += SPAN) {
    if (ahead)
      for (int64_t line = 0; line < STEP; line += LINE) __builtin_prefetch(w + AHEAD + line);
    const char* weights = w;
    w += STEP;
    if constexpr (Paired<Weights>::RAISED != 1) {
      weights = next;
      memory_is_read();
      if (k + SPAN < K) next = Paired<Weights>::pairs(w, room[(k / SPAN + 1) % 2]);  // long before a tile loads them
      memory_is_read();
    }
    _tile_loadd(6, weights, 4 * WIDTH);
    _tile_loadd(7, weights + LINE, 4 * WIDTH);
    _tile_loadd(4, x + k, 2 * K);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (SECOND) {
      _tile_loadd(5, x + LINES * K + k, 2 * K);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  alignas(64) float sums[4][LINES][LANES];
  _tile_stored(0, sums[0], LINE);
  _tile_stored(1, sums[1], LINE);
  if (SECOND) {
    _tile_stored(2, sums[2], LINE);
    _tile_stored(3, sums[3], LINE);
  }
  memory_is_read();
  for (int64_t m = done; m < rows; m++)
    for (int half = 0; half < 2; half++) {
      Floats sum;
      memcpy(&sum, sums[m / LINES * 2 + half][m % LINES], sizeof sum);
      finish(end, m, half * LANES, sum);
    }
}

#endif

template <typename Weights>
inline bool in_tiles([[maybe_unused]] int64_t K) {
#if defined(TILES)
  return Paired<Weights>::THERE && K % SPAN == 0 && tiles_granted();
#else
  return false;
#endif
}

// The inputs of a product as they are multiplied: x [M, K], or a converted copy in `room`, which has 4 * M * K bytes.
// Without AVX512-BF16 they are widened to float32; for int8 weights in tiles they are raised.
template <typename Weights>
struct Inputs {
  const bf16* x;
  int64_t M, K;
  char* room;

#if defined(TILES)
  bool raises() const { return in_tiles<Weights>(K) && Paired<Weights>::RAISED != 1; }
#else
  bool raises() const { return false; }
#endif
#if defined(__AVX512BF16__)
  bool converts() const { return raises(); }
#else
  bool converts() const { return raises() || !in_tiles<Weights>(K); }
#endif

  void convert(int64_t i) const {  // LANES inputs from i on; the last may be fewer
#if defined(TILES)
    if (raises()) return store(reinterpret_cast<bf16*>(room) + i, load(x + i) * Paired<Weights>::RAISED);
#endif
    for (const int64_t end = i + LANES < M * K ? i + LANES : M * K; i < end; i++)
      reinterpret_cast<float*>(room)[i] = widen(x[i]);
  }

  void convert_all() const {
    for (int64_t i = 0; i < M * K; i += LANES) convert(i);
  }

  const void* rows(int64_t from) const {  // from row `from` on
    const int64_t size = in_tiles<Weights>(K) ? sizeof(bf16) : sizeof(Input);
    return (converts() ? room : reinterpret_cast<const char*>(x)) + from * K * size;
  }
};

#if defined(TILES)

// All rows with one block of weights. The thread's tiles are shaped for min(M, 2 * LINES) rows.
template <typename Weights>
void multiply_block_in_tiles(const char* w, const bf16* x, int64_t M, int64_t K, End end) {
  constexpr int64_t STEP = SPAN / Weights::INPUTS * 4 * WIDTH, PAIRED = SPAN * 2 * WIDTH;  // bytes of SPAN inputs
  const int64_t rows = M < 2 * LINES ? M : 2 * LINES;
  end.unit = 1 / (Paired<Weights>::LOWERED * Paired<Weights>::RAISED);
  static thread_local std::vector<char> held;
  const bool paired_once = STEP != PAIRED && M > rows;
  const size_t needed = paired_once ? K / SPAN * PAIRED : 0;
  if (held.size() < needed) held.resize(needed);
  if (paired_once)
    for (int64_t step = 0; step < K / SPAN; step++) Paired<Weights>::pairs(w + step * STEP, held.data() + step * PAIRED);
  for (int64_t from = 0; from < M; from += rows) {
    // The last pass may overlap the one before, whose results may have taken the place of their residuals.
    const int64_t m = from < M - rows ? from : M - rows, done = from - m;
    if (paired_once)
      multiply_tiles<Bfloat16, true>(held.data(), x + m * K, K, rows, false, done, end.from_row(m));
    else if (rows > LINES)
      multiply_tiles<Weights, true>(w, x + m * K, K, rows, from == 0, done, end.from_row(m));
    else
      multiply_tiles<Weights, false>(w, x + m * K, K, rows, from == 0, done, end.from_row(m));
  }
}

#endif

typedef void Multiply(const char*, const Input*, int64_t, const End&);

template <typename Weights, typename>
struct ByRows;
template <typename Weights, int... I>
struct ByRows<Weights, std::integer_sequence<int, I...>> {
  static constexpr Multiply* multiply[] = {::multiply<Weights, I + 1>...};  // for 1 row, for 2, ..
};

// M rows with one block of weights. inputs: `Inputs::rows`.
template <typename Weights>
void multiply_block(const char* w, const void* inputs, int64_t M, int64_t K, const End& end) {
#if defined(TILES)
  if (in_tiles<Weights>(K)) return multiply_block_in_tiles<Weights>(w, static_cast<const bf16*>(inputs), M, K, end);
#endif
  typedef ByRows<Weights, std::make_integer_sequence<int, ROWS_A_PASS>> Pass;
  const int64_t passes = (M + ROWS_A_PASS - 1) / ROWS_A_PASS;
  for (int64_t pass = 0; pass < passes; pass++) {
    const int64_t m = M * pass / passes, some = M * (pass + 1) / passes - m;  // passes differ by at most one row
    Pass::multiply[some - 1](w, static_cast<const Input*>(inputs) + m * K, K, end.from_row(m));
  }
}

// One thread's tiles for products of M rows; without tiles nothing.
struct TeamTiles {
#if defined(TILES)
  std::optional<Tiles> tiles;
  TeamTiles(int64_t M, bool used) {
    if (used) shape_tiles(tiles.emplace(), M < 2 * LINES ? M : 2 * LINES);
  }
#else
  TeamTiles(int64_t, bool) {}
#endif
};

// A weight in blocks: bfloat16, or int8 with a scale [N] per output. bias [N] or null. K inputs, N outputs.
struct Linear {
  const char* w;
  const float* scale;
  const bf16* bias;
  int64_t N, K;

  const char* block(int64_t number) const {
    const int64_t bytes_an_input = (scale ? 1 : 2) * WIDTH;
    return w + number * K * bytes_an_input;
  }

  End end(int64_t number, bf16* y, int64_t stride, const bf16* residual) const {
    const int64_t first = number * WIDTH, count = N - first < WIDTH ? N - first : WIDTH;
    return {y, stride, count, scale ? scale + first : nullptr, bias ? bias + first : nullptr, 1, residual};
  }
};

// Every thread of a team calls it: y = x w^T + b, and then + residual [M, N] if there is one. A barrier ends it.
template <typename Weights>
void team_product(const Linear& linear, const Inputs<Weights>& inputs, bool convert, bf16* y, const bf16* residual) {
  if (convert && inputs.converts()) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < inputs.M * inputs.K; i += LANES) inputs.convert(i);
  }
  const TeamTiles tiles(inputs.M, in_tiles<Weights>(linear.K));
  const int64_t blocks = (linear.N + WIDTH - 1) / WIDTH;
  const int64_t panels = (inputs.M + ROWS_A_PANEL - 1) / ROWS_A_PANEL;
#pragma omp for collapse(2) schedule(static)
  for (int64_t panel = 0; panel < panels; panel++)
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t first = block * WIDTH, m = inputs.M * panel / panels;
      const End end = linear.end(block, y + first, linear.N, residual ? residual + first : nullptr);
      const int64_t rows = inputs.M * (panel + 1) / panels - m;
      multiply_block<Weights>(linear.block(block), inputs.rows(m), rows, inputs.K, end.from_row(m));
    }
}

}  // namespace
