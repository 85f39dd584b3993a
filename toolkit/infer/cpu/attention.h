// Attention of a few new nodes per row over the pages of a cache: the attention of a decoding step, in one call. The keys
// and values of the new nodes are written to the cache first.
//
//     keys, values [entries, Hkv, D]: position p of row b at entry table[b][p / PAGE] * PAGE + p % PAGE. Page 0 follows
//                the end of a table; it is not written
//     position   0 .. length-1            length .. length+M-1
//                seen by all new nodes    node m: seen by new node n if mask[b][n][m]; the last N are new
//
// Scores, shares (softmax weights) and sums are float32. The order of every sum depends on the positions alone, so a
// node's result does not depend on the other nodes and rows, nor on the number of threads. On a CPU with tiles (AMX),
// bfloat16 is scored and summed in tiles; the shares are then rounded to bfloat16. Without tiles, a drafted node's
// result is that of the same token in plain decoding: the nodes that it does not see leave no gap in a sum.
//
// Shapes: B rows, N new nodes per row, M uncommitted nodes per row, Hq query heads, Hkv key heads, D head dim.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "amx_tiles.h"
#include "vectors.h"

namespace {

// Without tiles, one pass scores KEYS keys for TOGETHER queries. With tiles, TOGETHER is the smaller number of columns.
constexpr int KEYS = 4, TOGETHER = LANES / KEYS;
constexpr int64_t PAGE = 16;  // positions of a page
static_assert(PAGE % LANES == 0 && PAGE % KEYS == 0, "no pass reads past the last page");

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLED(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLED(x, y, ...) __builtin_shuffle(x, y, Ints{__VA_ARGS__})
#endif

// Every four lanes of the result are the sums of these four lanes of a, b, c and d.
inline Floats fold(Floats a, Floats b, Floats c, Floats d) {
#if defined(__AVX512F__)
#define LOW(x, y) SHUFFLED(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define HIGH(x, y) SHUFFLED(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define FIRST(x, y) SHUFFLED(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define SECOND(x, y) SHUFFLED(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#else
#define LOW(x, y) SHUFFLED(x, y, 0, 8, 1, 9, 4, 12, 5, 13)
#define HIGH(x, y) SHUFFLED(x, y, 2, 10, 3, 11, 6, 14, 7, 15)
#define FIRST(x, y) SHUFFLED(x, y, 0, 1, 8, 9, 4, 5, 12, 13)
#define SECOND(x, y) SHUFFLED(x, y, 2, 3, 10, 11, 6, 7, 14, 15)
#endif
  const Floats ab = LOW(a, b) + HIGH(a, b), cd = LOW(c, d) + HIGH(c, d);
  return FIRST(ab, cd) + SECOND(ab, cd);
}

// The sums of LANES vectors, one per lane.
inline Floats sums_of(const Floats (&of)[TOGETHER][KEYS]) {
  Floats folded[TOGETHER];
  for (int i = 0; i < TOGETHER; i++) folded[i] = fold(of[i][0], of[i][1], of[i][2], of[i][3]);
#if defined(__AVX512F__)
#define HALVES(x, y) (SHUFFLED(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +         \
                      SHUFFLED(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
  const Floats low = HALVES(folded[0], folded[1]), high = HALVES(folded[2], folded[3]);
  return SHUFFLED(low, high, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         SHUFFLED(low, high, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
#else
  return SHUFFLED(folded[0], folded[1], 0, 1, 2, 3, 8, 9, 10, 11) +
         SHUFFLED(folded[0], folded[1], 4, 5, 6, 7, 12, 13, 14, 15);
#endif
}

struct Strides {  // of a [B, heads, N, D] tensor whose last dimension is contiguous
  int64_t row, head, node;
};

template <typename T>
struct Call {
  const T *q, *k, *v;
  T *keys, *values, *out;
  const int64_t *lengths, *table;
  const uint8_t* mask;
  int64_t B, N, M, Hq, Hkv, D, table_row;  // table_row: from one row of the table to the next
  Strides of_q, of_k, of_v;
  bool tiles;  // whether tiles may be used
  float scaling;
};

// One head's keys or values of a row.
template <typename T>
struct Paged {
  T* first;  // of entry 0
  const int64_t* pages;
  int64_t stride;  // from one entry to the next

  Paged(const Call<std::remove_const_t<T>>& call, T* store, int64_t b, int64_t h)
      : first(store + h * call.D), pages(call.table + b * call.table_row), stride(call.Hkv * call.D) {}

  T* page_of(int64_t s) const { return first + pages[s / PAGE] * PAGE * stride; }
  T* at(int64_t s) const { return page_of(s) + s % PAGE * stride; }
};

// scores[i][s]: query i of TOGETHER and key s of a row. width: a multiple of LANES.
template <typename T>
void score(const float* queries, const Paged<const T>& keys, int64_t seen, int64_t D, float* scores, int64_t width) {
  for (int64_t s = 0; s < width; s += KEYS) {
    Floats sums[TOGETHER][KEYS];
    const T *key[KEYS], *page = keys.page_of(s);
    const int64_t begin = s % PAGE, last = seen - 1 - (s - begin);
    for (int j = 0; j < KEYS; j++) {
      key[j] = page + (begin + j < last ? begin + j : last) * keys.stride;
      for (int i = 0; i < TOGETHER; i++) sums[i][j] = Floats{};
    }
    for (int64_t d = 0; d < D; d += LANES) {
      Floats part[KEYS];
      for (int j = 0; j < KEYS; j++) part[j] = load(key[j] + d);
      for (int i = 0; i < TOGETHER; i++) {
        const Floats query = load(queries + i * D + d);
        for (int j = 0; j < KEYS; j++) sums[i][j] += query * part[j];
      }
    }
    const Floats found = sums_of(sums);
    for (int i = 0; i < TOGETHER; i++)
      memcpy(scores + i * width + s, reinterpret_cast<const float*>(&found) + i * KEYS, KEYS * sizeof(float));
  }
}

// Sums of the values for TOGETHER queries, weighted by shares [TOGETHER, width]: PARTS vectors of D, from `from` on.
// whole: the sums of the shares. to: null for a padding query.
template <int PARTS, typename T>
void gather(const float* shares, int64_t width, const Paged<const T>& values, int64_t seen, const float* whole,
            T* const* to, int64_t from) {
  Floats sums[TOGETHER][PARTS];
  for (auto& of_query : sums)
    for (auto& part : of_query) part = Floats{};
  for (int64_t begin = 0; begin < seen; begin += PAGE) {
    const T* at = values.page_of(begin) + from;
    const int64_t end = begin + PAGE < seen ? begin + PAGE : seen;
    for (int64_t s = begin; s < end; s++, at += values.stride) {
      Floats value[PARTS];
      for (int j = 0; j + 1 < PARTS; j += 2) load(at + j * LANES, value[j], value[j + 1]);
      if (PARTS == 1) value[0] = load(at);
      for (int i = 0; i < TOGETHER; i++)
        for (int j = 0; j < PARTS; j++) sums[i][j] += shares[i * width + s] * value[j];
    }
  }
  for (int i = 0; i < TOGETHER && to[i]; i++) {
    for (int j = 0; j + 1 < PARTS; j += 2)
      store(to[i] + from + j * LANES, sums[i][j] / whole[i], sums[i][j + 1] / whole[i]);
    if (PARTS == 1) store(to[i] + from, sums[i][0] / whole[i]);
  }
}

// Replaces scores by unnormalised softmax weights; returns their sum, in which the M nodes from `length` on that are
// seen stand one after another, as in plain decoding. sees: null if all are. path: room for 2 * LANES + M.
inline float shares_of(float* scores, int64_t length, int64_t M, int64_t width, const uint8_t* sees, float* path) {
  for (int64_t s = length + M; s < width; s++) scores[s] = -INFINITY;
  Floats most = load(scores), sums = Floats{};
  for (int64_t s = LANES; s < width; s += LANES) {
    const Floats here = load(scores + s);
    most = here > most ? here : most;
  }
  float largest = most[0];
  for (int lane = 1; lane < LANES; lane++) largest = most[lane] > largest ? most[lane] : largest;
  const int64_t begin = sees ? length / LANES * LANES : width;
  for (int64_t s = 0; s < width; s += LANES) {
    const Floats e = exponential(load(scores + s) - largest);
    store(scores + s, e);
    if (s < begin) sums += e;
  }
  if (sees) {
    int64_t count = length - begin;
    memcpy(path, scores + begin, count * sizeof(float));
    for (int64_t m = 0; m < M; m++)
      if (sees[m]) path[count++] = scores[length + m];
    while (count % LANES) path[count++] = 0;
    for (int64_t s = 0; s < count; s += LANES) sums += load(path + s);
  }
  return sum(sums);
}

// SIZE queries of one key head: what they see, and where their results go. The last may be padding.
template <typename T, int SIZE>
struct Queries {
  int64_t b, h, first, count;  // first: index in [query heads of h, N]; count: queries that are not padding
  T* to[SIZE];                 // null for padding
  const uint8_t* sees[SIZE];

  Queries(const Call<T>& call, int64_t b, int64_t h, int64_t first) : b(b), h(h), first(first) {
    const int64_t groups = call.Hq / call.Hkv, left = groups * call.N - first;
    count = left < SIZE ? left : SIZE;
    for (int64_t i = 0; i < SIZE; i++) {
      const int64_t group = (first + i) / call.N, node = b * call.N + (first + i) % call.N;
      to[i] = i < count ? call.out + (node * call.Hq + h * groups + group) * call.D : nullptr;
      sees[i] = call.mask && i < count ? call.mask + node * call.M : nullptr;
    }
  }

  const T* from(const Call<T>& call, int64_t i) const {  // padding reads the first query instead
    const int64_t at = first + (i < count ? i : 0), head = h * (call.Hq / call.Hkv) + at / call.N;
    return call.q + b * call.of_q.row + head * call.of_q.head + at % call.N * call.of_q.node;
  }
};

float* room_for(size_t numbers) {
  static thread_local std::vector<float> held;
  if (held.size() < numbers) held.resize(numbers);
  return held.data();
}

template <typename T>
void attend(const Call<T>& call, const Queries<T, TOGETHER>& queries) {
  const int64_t length = call.lengths[queries.b], seen = length + call.M, D = call.D;
  const int64_t width = (seen + LANES - 1) / LANES * LANES;
  const Paged<const T> keys(call, call.keys, queries.b, queries.h), values(call, call.values, queries.b, queries.h);
  float* scaled = room_for(TOGETHER * (D + width) + 2 * LANES + call.M);
  float *scores = scaled + TOGETHER * D, whole[TOGETHER];
  for (int64_t i = 0; i < TOGETHER; i++) {
    const T* from = queries.from(call, i);
    for (int64_t d = 0; d < D; d += LANES) store(scaled + i * D + d, load(from + d) * call.scaling);
  }
  score(scaled, keys, seen, D, scores, width);
  for (int64_t i = 0; i < TOGETHER; i++) {
    for (int64_t m = 0; queries.sees[i] && m < call.M; m++)
      if (!queries.sees[i][m]) scores[i * width + length + m] = -INFINITY;
    whole[i] = shares_of(scores + i * width, length, call.M, width, queries.sees[i], scores + TOGETHER * width);
  }
  for (int64_t d = 0; d < D;) {
    const int64_t left = (D - d) / LANES;
    const int parts = left >= 4 ? 4 : left >= 2 ? 2 : 1;
    auto* of_parts = parts == 4 ? gather<4, T> : parts == 2 ? gather<2, T> : gather<1, T>;
    of_parts(scores, width, values, seen, whole, queries.to, d);
    d += parts * LANES;
  }
}

#if defined(TILES)

// Positions to prefetch ahead: the core's prefetcher does not follow pages. The values of the first ones are prefetched
// with their keys.
constexpr int64_t KEYS_AHEAD = 8 * PAGE, WITH_KEYS = 16 * PAGE;

// Prefetches `size` numbers, from `from` on, of each entry of the page of position s, if it is seen.
inline void fetch(const Paged<const bf16>& of, int64_t s, int64_t seen, int64_t from, int64_t size) {
  if (s >= seen) return;
  const bf16* at = of.page_of(s) + from;
  for (int64_t i = 0; i < PAGE; i++, at += of.stride)
    for (int64_t d = 0; d < size; d += SPAN) __builtin_prefetch(at + d);
}

// scores [seen, COLUMNS] of a row's keys and COLUMNS queries. pairs [D / 2, COLUMNS, 2]: the queries.
template <int COLUMNS>
void score_in_tiles(const bf16* pairs, const Paged<const bf16>& keys, const Paged<const bf16>& values, int64_t seen,
                    int64_t D, float* scores) {
  static_assert(PAGE == LINES, "a tile has the keys of a page");
  for (int64_t s = 0; s < KEYS_AHEAD; s += PAGE) fetch(keys, s, seen, 0, D);
  constexpr int64_t BYTES = 4 * COLUMNS;
  const int64_t between = 2 * keys.stride;  // bytes
  const int64_t rest = seen % LINES, whole = seen - rest;
  Tiles tiles;  // sums 0 and 3, keys 1 and 4: double-buffered. Queries: 2. The last, fewer keys: sums 6, keys 7
  for (int tile : {0, 3, 6}) tiles.shape(tile, tile < 6 || !rest ? LINES : rest, BYTES);
  for (int tile : {1, 4, 7}) tiles.shape(tile, tile < 7 || !rest ? LINES : rest, LINE);
  tiles.shape(2, LINES, BYTES);
  tiles.use();
  int64_t s = 0;
  for (; s + 2 * LINES <= whole; s += 2 * LINES) {
    for (int64_t at = s; at < s + 2 * LINES; at += PAGE) {
      fetch(keys, at + KEYS_AHEAD, seen, 0, D);
      if (at < WITH_KEYS) fetch(values, at, seen, 0, D);
    }
    _tile_zero(0);
    _tile_zero(3);
    for (int64_t d = 0; d < D; d += SPAN) {
      _tile_loadd(2, pairs + d * COLUMNS, BYTES);
      _tile_loadd(1, keys.page_of(s) + d, between);
      _tile_dpbf16ps(0, 1, 2);
      _tile_loadd(4, keys.page_of(s + LINES) + d, between);
      _tile_dpbf16ps(3, 4, 2);
    }
    _tile_stored(0, scores + s * COLUMNS, BYTES);
    _tile_stored(3, scores + (s + LINES) * COLUMNS, BYTES);
  }
  _tile_zero(0);
  _tile_zero(6);
  for (int64_t d = 0; d < D; d += SPAN) {
    _tile_loadd(2, pairs + d * COLUMNS, BYTES);
    if (s < whole) {
      _tile_loadd(1, keys.page_of(s) + d, between);
      _tile_dpbf16ps(0, 1, 2);
    }
    if (rest) {
      _tile_loadd(7, keys.page_of(whole) + d, between);
      _tile_dpbf16ps(6, 7, 2);
    }
  }
  if (s < whole) _tile_stored(0, scores + s * COLUMNS, BYTES);
  if (rest) _tile_stored(6, scores + whole * COLUMNS, BYTES);
  memory_is_read();
}

#define OTHER_HALF(x) SHUFFLED(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define OTHER_FOURS(x) SHUFFLED(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)

// Reduces KEYS numbers of each query by `both`, in the same order for both layouts.
template <typename Both>
inline Floats of_all(const Floats (&x)[1], Both both) {
  const Floats halves = both(x[0], OTHER_HALF(x[0]));
  return both(halves, OTHER_FOURS(halves));
}

template <typename Both>
inline Floats of_all(const Floats (&x)[4], Both both) {
  return both(both(x[0], x[2]), both(x[1], x[3]));
}

// Replaces scores [width, COLUMNS] by unnormalised softmax weights, 0 after the first `seen` keys. whole: their sums.
template <int COLUMNS>
void shares_by_key(float* scores, int64_t seen, int64_t width, float scaling, float* whole) {
  constexpr int PARTS = KEYS * COLUMNS / LANES;
  const auto larger = [](Floats a, Floats b) { return a > b ? a : b; };
  for (int64_t at = seen * COLUMNS; at < width * COLUMNS; at++) scores[at] = -INFINITY;
  Floats most[PARTS], sums[PARTS];
  for (int part = 0; part < PARTS; part++) {
    most[part] = load(scores + part * LANES) * scaling;
    sums[part] = Floats{};
  }
  for (float* at = scores; at < scores + width * COLUMNS; at += PARTS * LANES)
    for (int part = 0; part < PARTS; part++) {
      const Floats here = load(at + part * LANES) * scaling;
      store(at + part * LANES, here);  // rounded only here, so that no score exceeds the largest
      most[part] = larger(here, most[part]);
    }
  const Floats largest = of_all(most, larger);
  for (float* at = scores; at < scores + width * COLUMNS; at += PARTS * LANES)
    for (int part = 0; part < PARTS; part++) {
      const Floats e = exponential(load(at + part * LANES) - largest);
      store(at + part * LANES, e);
      sums[part] += e;
    }
  const Floats all = of_all(sums, [](Floats a, Floats b) { return a + b; });
  memcpy(whole, &all, COLUMNS * sizeof(float));
}

template <int STEP>
inline void swap_blocks(__m512i (&rows)[LINES]) {
  alignas(64) int32_t of_low[LINES], of_high[LINES];
  for (int lane = 0; lane < LINES; lane++) {
    of_low[lane] = lane & STEP ? LINES + lane - STEP : lane;
    of_high[lane] = lane & STEP ? LINES + lane : lane + STEP;
  }
  const __m512i low = _mm512_load_si512(of_low), high = _mm512_load_si512(of_high);
  for (int row = 0; row < LINES; row++) {
    if (row & STEP) continue;
    const __m512i above = rows[row], below = rows[row + STEP];
    rows[row] = _mm512_permutex2var_epi32(above, low, below);
    rows[row + STEP] = _mm512_permutex2var_epi32(above, high, below);
  }
}

// Shares of SPAN keys [SPAN, COLUMNS] -> bfloat16, transposed: one row per query, `width` apart.
inline void by_query(const float* shares, int64_t width, bf16* to, std::integral_constant<int, LINES>) {
  __m512i rows[LINES];  // pairs of keys
  for (int64_t p = 0; p < LINES; p++) {
    const float* at = shares + 2 * p * LINES;
    rows[p] = (__m512i)((rounded(load(at)) >> 16) | (rounded(load(at + LINES)) & 0xffff0000u));
  }
  swap_blocks<1>(rows);
  swap_blocks<2>(rows);
  swap_blocks<4>(rows);
  swap_blocks<8>(rows);
  for (int64_t i = 0; i < LINES; i++) _mm512_storeu_si512(to + i * width, rows[i]);
}

inline void by_query(const float* shares, int64_t width, bf16* to, std::integral_constant<int, TOGETHER>) {
  const __m512i every = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60);
  alignas(64) float keys[SPAN * TOGETHER];
  memcpy(keys, shares, sizeof keys);
  for (int64_t i = 0; i < TOGETHER; i++) {
    const __m512 first = _mm512_i32gather_ps(every, keys + i, 4);
    const __m512 second = _mm512_i32gather_ps(every, keys + i + LINES * TOGETHER, 4);
    const auto narrow = [](__m512 x) { return __builtin_convertvector(rounded((Floats)x) >> 16, Halves); };
    const Halves low = narrow(first), high = narrow(second);
    memcpy(to + i * width, &low, sizeof low);
    memcpy(to + i * width + LINES, &high, sizeof high);
  }
}

// PARTS tiles of the values of SPAN keys, in two pages, as pairs of keys; zeros after the first `count` keys. Of every two tiles, the
// first has the first four of every eight columns.
template <int PARTS>
inline void pairs_of(const bf16* const (&pages)[2], int64_t stride, int64_t count, __m512i (&to)[PARTS][LINES]) {
  static const bf16 none[4 * LANES] = {};
  for (int64_t p = 0; p < LINES; p++) {
    const bf16* at = pages[2 * p / PAGE] + 2 * p % PAGE * stride;
    const bf16 *low = 2 * p < count ? at : none, *high = 2 * p + 1 < count ? at + stride : none;
    for (int part = 0; part < PARTS; part += 2) {
      const __m512i a = _mm512_loadu_si512(low + part * LANES), b = _mm512_loadu_si512(high + part * LANES);
      to[part][p] = _mm512_unpacklo_epi16(a, b);
      to[part + 1][p] = _mm512_unpackhi_epi16(a, b);
    }
  }
}

// Sums of the values, weighted by shares [COLUMNS, width]: PARTS vectors of D, from `from` on.
template <int PARTS, int COLUMNS>
void gather_in_tiles(const bf16* shares, int64_t width, const Paged<const bf16>& values, int64_t seen,
                     const float* whole, const Queries<bf16, COLUMNS>& queries, int64_t from) {
  Tiles tiles;  // sums 0 to 3, shares 4, values 5 to 7
  for (int tile = 0; tile < 8; tile++) tiles.shape(tile, tile < 5 ? queries.count : LINES, LINE);
  tiles.use();
  __m512i room[2][PARTS][LINES];
  const auto prepare = [&](int64_t s) {
    const bf16* first = values.page_of(s) + from;
    if (s + KEYS_AHEAD >= WITH_KEYS)
      for (int64_t at = s; at < s + SPAN; at += PAGE) fetch(values, at + KEYS_AHEAD, seen, from, PARTS * LANES);
    const bf16* const pages[2] = {first, s + PAGE < seen ? values.page_of(s + PAGE) + from : first};
    pairs_of<PARTS>(pages, values.stride, seen - s, room[s / SPAN % 2]);
  };
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  prepare(0);
  for (int64_t s = 0; s < width; s += SPAN) {
    memory_is_read();
    if (s + SPAN < width) prepare(s + SPAN);  // long before a tile loads them
    const auto& pairs = room[s / SPAN % 2];
    memory_is_read();
    _tile_loadd(4, shares + s, 2 * width);
    _tile_loadd(5, pairs[0], LINE);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, pairs[1], LINE);
    _tile_dpbf16ps(1, 4, 6);
    if constexpr (PARTS > 2) {
      _tile_loadd(5, pairs[2], LINE);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(6, pairs[3], LINE);
      _tile_dpbf16ps(3, 4, 6);
    }
  }
  alignas(64) float sums[4][LINES][LANES];
  _tile_stored(0, sums[0], LINE);
  _tile_stored(1, sums[1], LINE);
  _tile_stored(2, sums[2], LINE);
  _tile_stored(3, sums[3], LINE);
  memory_is_read();
  for (int64_t i = 0; i < queries.count; i++)
    for (int part = 0; part < PARTS; part += 2) {
      const Floats a = load(sums[part][i]) / whole[i], b = load(sums[part + 1][i]) / whole[i];
      bf16* to = queries.to[i] + from + part * LANES;
      store(to, SHUFFLED(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
      store(to + LANES, SHUFFLED(a, b, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
    }
}

template <int COLUMNS>
void attend_in_tiles(const Call<bf16>& call, const Queries<bf16, COLUMNS>& queries) {
  const int64_t length = call.lengths[queries.b], seen = length + call.M, D = call.D;
  const int64_t width = (seen + SPAN - 1) / SPAN * SPAN;
  const Paged<const bf16> keys(call, call.keys, queries.b, queries.h), values(call, call.values, queries.b, queries.h);
  float *scores = room_for(COLUMNS * (D + 3 * width) / 2), whole[COLUMNS];
  bf16 *shares = reinterpret_cast<bf16*>(scores + COLUMNS * width), *pairs = shares + COLUMNS * width;
  for (int64_t i = 0; i < COLUMNS; i++) {
    const bf16* from = queries.from(call, i);
    for (int64_t d = 0; d < D; d += 2) memcpy(pairs + d * COLUMNS + 2 * i, from + d, 2 * sizeof(bf16));
  }
  score_in_tiles<COLUMNS>(pairs, keys, values, seen, D, scores);
  for (int64_t i = 0; i < queries.count; i++)
    for (int64_t m = 0; queries.sees[i] && m < call.M; m++)
      if (!queries.sees[i][m]) scores[(length + m) * COLUMNS + i] = -INFINITY;
  shares_by_key<COLUMNS>(scores, seen, width, call.scaling, whole);
  for (int64_t s = 0; s < width; s += SPAN)
    by_query(scores + s * COLUMNS, width, shares + s, std::integral_constant<int, COLUMNS>());
  for (int64_t d = 0; d < D;) {
    const bool four = D - d >= 4 * LANES;
    auto* of_parts = four ? gather_in_tiles<4, COLUMNS> : gather_in_tiles<2, COLUMNS>;
    of_parts(shares, width, values, seen, whole, queries, d);
    d += (four ? 4 : 2) * LANES;
  }
}

#endif

// Writes the new nodes' keys and values of one head to the cache.
template <typename T>
void write(const Call<T>& call, int64_t b, int64_t h) {
  const int64_t N = call.N, begin = call.lengths[b] + call.M - N;
  const Paged<T> keys(call, call.keys, b, h), values(call, call.values, b, h);
  const Strides &k = call.of_k, &v = call.of_v;
  for (int64_t n = 0; n < N; n++) {
    if (!keys.pages[(begin + n) / PAGE]) continue;  // padding: page 0 is every row's, and stays zero
    memcpy(keys.at(begin + n), call.k + b * k.row + h * k.head + n * k.node, call.D * sizeof(T));
    memcpy(values.at(begin + n), call.v + b * v.row + h * v.head + n * v.node, call.D * sizeof(T));
  }
}

// Every thread of a team calls it: writes the keys and values, then calls attend_some for every SIZE queries of a key head.
template <typename T, int SIZE>
void team_attend_by(const Call<T>& call, void (*attend_some)(const Call<T>&, const Queries<T, SIZE>&)) {
  const int64_t heads = call.B * call.Hkv, units = (call.Hq / call.Hkv * call.N + SIZE - 1) / SIZE;
#pragma omp for schedule(static)
  for (int64_t head = 0; head < heads; head++) write(call, head / call.Hkv, head % call.Hkv);
#pragma omp for schedule(static)
  for (int64_t unit = 0; unit < heads * units; unit++) {
    const int64_t head = unit / units;
    attend_some(call, Queries<T, SIZE>(call, head / call.Hkv, head % call.Hkv, unit % units * SIZE));
  }
}

template <typename T>
void team_attend(const Call<T>& call) {
#if defined(TILES)
  if constexpr (std::is_same_v<T, bf16>)
    if (call.tiles && call.D % SPAN == 0 && tiles_granted()) {
      const bool few = call.Hq / call.Hkv * call.N <= TOGETHER;
      return few ? team_attend_by(call, attend_in_tiles<TOGETHER>) : team_attend_by(call, attend_in_tiles<LINES>);
    }
#endif
  team_attend_by(call, attend<T>);
}

}  // namespace
