// Attention of a few new nodes a row over rows of a cache that lie side by side: what a decoding step asks of a CPU, in
// one call. Keys and values of the new nodes are written first.
//
//     keys, values [rows, stride_row]: position p of a row, head h at p * Hkv * D + h * D
//     position   0 .. length-1            length .. length+M-1
//                seen by all new nodes    node m: seen by new node n where mask[b][n][m]; the new ones are the last N
//
// Scores, shares and sums are float32, added in an order that the positions decide, so that a node's result does not
// depend on the nodes and rows beside it, nor on the number of threads. Where the CPU has tiles (AMX) they score bfloat16.
//
// Shapes: B rows, N new nodes a row, M nodes a row that are not committed, Hq query heads, Hkv key heads, D head dim.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "amx_tiles.h"
#include "vectors.h"

namespace at {
int get_num_threads();  // of the calling thread, as torch.set_num_threads left it
}

namespace {

constexpr int KEYS = 4, TOGETHER = LANES / KEYS;  // scored in one pass: so many keys by so many queries
constexpr double WORTH_THREADS = 1 << 17;         // multiplications of one call; fewer are done before threads have begun

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLED(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLED(x, y, ...) __builtin_shuffle(x, y, Ints{__VA_ARGS__})
#endif

// In every four lanes the sums of a's, b's, c's and d's four.
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

// The sums of LANES vectors, side by side.
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

struct Strides {  // of [B, heads, N, D] tensors whose D lies side by side
  int64_t row, head, node;
};

template <typename T>
struct Call {
  const T *q, *k, *v;
  T *keys, *values, *out;
  const int64_t* lengths;
  const uint8_t* mask;
  int64_t B, N, M, Hq, Hkv, D, stride_row;
  Strides of_q, of_k, of_v;
  float scaling;
};

// scores[i][s] of TOGETHER queries i and the keys s of a row; width is a multiple of LANES.
template <typename T>
void score(const float* queries, const T* keys, int64_t stride, int64_t seen, int64_t D, float* scores, int64_t width) {
  for (int64_t s = 0; s < width; s += KEYS) {
    Floats sums[TOGETHER][KEYS];
    const T* key[KEYS];
    for (int j = 0; j < KEYS; j++) {
      key[j] = keys + (s + j < seen ? s + j : seen - 1) * stride;
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

// TOGETHER queries' sums of the values, by their shares: PARTS vectors of their D. to: null for a query that is none.
// BY_KEY: shares lie as [keys, TOGETHER], else as [TOGETHER, width].
template <int PARTS, bool BY_KEY, typename T>
void gather(const float* shares, int64_t width, const T* values, int64_t stride, int64_t seen, const float* whole,
            T* const* to, int64_t from) {
  Floats sums[TOGETHER][PARTS];
  for (auto& of_query : sums)
    for (auto& part : of_query) part = Floats{};
  for (int64_t s = 0; s < seen; s++) {
    Floats value[PARTS];
    const T* at = values + s * stride + from;
    for (int j = 0; j + 1 < PARTS; j += 2) load(at + j * LANES, value[j], value[j + 1]);
    if (PARTS == 1) value[0] = load(at);
    for (int i = 0; i < TOGETHER; i++)
      for (int j = 0; j < PARTS; j++) sums[i][j] += shares[BY_KEY ? s * TOGETHER + i : i * width + s] * value[j];
  }
  for (int i = 0; i < TOGETHER && to[i]; i++) {
    for (int j = 0; j + 1 < PARTS; j += 2)
      store(to[i] + from + j * LANES, sums[i][j] / whole[i], sums[i][j + 1] / whole[i]);
    if (PARTS == 1) store(to[i] + from, sums[i][0] / whole[i]);
  }
}

// Scores become shares that are not yet divided by their sum, which comes back.
inline float shares_of(float* scores, int64_t seen, int64_t width) {
  for (int64_t s = seen; s < width; s++) scores[s] = -INFINITY;
  Floats most = load(scores), sums = Floats{};
  for (int64_t s = LANES; s < width; s += LANES) {
    const Floats here = load(scores + s);
    most = here > most ? here : most;
  }
  float largest = most[0];
  for (int lane = 1; lane < LANES; lane++) largest = most[lane] > largest ? most[lane] : largest;
  for (int64_t s = 0; s < width; s += LANES) {
    const Floats e = exponential(load(scores + s) - largest);
    store(scores + s, e);
    sums += e;
  }
  return sum(sums);
}

// Of TOGETHER queries of one key head: the nodes that they stand for, and where their results go.
template <typename T>
struct Queries {
  int64_t b, h, first, count;  // of the head's queries, node by node of one query head after the other; `count` are real
  T* to[TOGETHER];             // null for one that is not
  const uint8_t* sees[TOGETHER];

  Queries(const Call<T>& call, int64_t b, int64_t h, int64_t first) : b(b), h(h), first(first) {
    const int64_t groups = call.Hq / call.Hkv, left = groups * call.N - first;
    count = left < TOGETHER ? left : TOGETHER;
    for (int64_t i = 0; i < TOGETHER; i++) {
      const int64_t group = (first + i) / call.N, node = b * call.N + (first + i) % call.N;
      to[i] = i < count ? call.out + (node * call.Hq + h * groups + group) * call.D : nullptr;
      sees[i] = call.mask && i < count ? call.mask + node * call.M : nullptr;
    }
  }

  const T* from(const Call<T>& call, int64_t i) const {  // the query; one that is real in the place of one that is not
    const int64_t at = first + (i < count ? i : 0), head = h * (call.Hq / call.Hkv) + at / call.N;
    return call.q + b * call.of_q.row + head * call.of_q.head + at % call.N * call.of_q.node;
  }
};

// Shares and their sums `whole` -> results.
template <bool BY_KEY, typename T>
void gather_all(const Call<T>& call, const Queries<T>& queries, const float* shares, int64_t width, const float* whole) {
  const int64_t stride = call.Hkv * call.D, seen = call.lengths[queries.b] + call.M;
  const T* values = call.values + queries.b * call.stride_row + queries.h * call.D;
  for (int64_t d = 0; d < call.D;) {
    const int64_t left = (call.D - d) / LANES;
    const int parts = left >= 4 ? 4 : left >= 2 ? 2 : 1;
    auto* of_parts = parts == 4 ? gather<4, BY_KEY, T> : parts == 2 ? gather<2, BY_KEY, T> : gather<1, BY_KEY, T>;
    of_parts(shares, width, values, stride, seen, whole, queries.to, d);
    d += parts * LANES;
  }
}

float* room_for(size_t numbers) {
  static thread_local std::vector<float> held;
  if (held.size() < numbers) held.resize(numbers);
  return held.data();
}

template <typename T>
void attend(const Call<T>& call, const Queries<T>& queries) {
  const int64_t length = call.lengths[queries.b], seen = length + call.M, D = call.D;
  const int64_t width = (seen + LANES - 1) / LANES * LANES;
  float *scaled = room_for(TOGETHER * (D + width)), *scores = scaled + TOGETHER * D, whole[TOGETHER];
  for (int64_t i = 0; i < TOGETHER; i++) {
    const T* from = queries.from(call, i);
    for (int64_t d = 0; d < D; d += LANES) store(scaled + i * D + d, load(from + d) * call.scaling);
  }
  const T* keys = call.keys + queries.b * call.stride_row + queries.h * D;
  score(scaled, keys, call.Hkv * D, seen, D, scores, width);
  for (int64_t i = 0; i < TOGETHER; i++) {
    for (int64_t m = 0; queries.sees[i] && m < call.M; m++)
      if (!queries.sees[i][m]) scores[i * width + length + m] = -INFINITY;
    whole[i] = shares_of(scores + i * width, seen, width);
  }
  gather_all<false>(call, queries, scores, width, whole);
}

#if defined(TILES)

// scores [seen, TOGETHER] of a row's keys and of queries as pairs [D / 2, TOGETHER, 2].
void score_in_tiles(const bf16* pairs, const bf16* keys, int64_t stride, int64_t seen, int64_t D, float* scores) {
  constexpr int64_t BYTES = 4 * TOGETHER;
  const int64_t rest = seen % LINES;
  Tiles tiles;  // of sums, keys and queries; those of the last keys, which are fewer
  tiles.shape(0, LINES, BYTES);
  tiles.shape(1, LINES, LINE);
  tiles.shape(2, LINES, BYTES);
  tiles.shape(3, rest ? rest : 1, BYTES);
  tiles.shape(4, rest ? rest : 1, LINE);
  tiles.use();
  for (int64_t s = 0; s + LINES <= seen; s += LINES) {
    _tile_zero(0);
    for (int64_t d = 0; d < D; d += SPAN) {
      _tile_loadd(1, keys + s * stride + d, 2 * stride);
      _tile_loadd(2, pairs + d * TOGETHER, BYTES);
      _tile_dpbf16ps(0, 1, 2);
    }
    _tile_stored(0, scores + s * TOGETHER, BYTES);
  }
  if (rest) {
    _tile_zero(3);
    for (int64_t d = 0; d < D; d += SPAN) {
      _tile_loadd(4, keys + (seen - rest) * stride + d, 2 * stride);
      _tile_loadd(2, pairs + d * TOGETHER, BYTES);
      _tile_dpbf16ps(3, 4, 2);
    }
    _tile_stored(3, scores + (seen - rest) * TOGETHER, BYTES);
  }
  memory_is_read();
}

#define OTHER_HALF(x) SHUFFLED(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define OTHER_FOURS(x) SHUFFLED(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)

// Scores [width, TOGETHER] become shares that are not yet divided by their sums `whole`; width: a multiple of KEYS.
void shares_by_key(float* scores, int64_t width, float scaling, float* whole) {
  Floats most = load(scores) * scaling, sums = Floats{};
  for (int64_t at = 0; at < width * TOGETHER; at += LANES) {
    const Floats here = load(scores + at) * scaling;
    store(scores + at, here);  // one product, so that no score is above the largest
    most = here > most ? here : most;
  }
  Floats other = OTHER_HALF(most);
  most = other > most ? other : most;
  other = OTHER_FOURS(most);
  most = other > most ? other : most;
  for (int64_t at = 0; at < width * TOGETHER; at += LANES) {
    const Floats e = exponential(load(scores + at) - most);
    store(scores + at, e);
    sums += e;
  }
  sums += OTHER_HALF(sums);
  sums += OTHER_FOURS(sums);
  memcpy(whole, &sums, TOGETHER * sizeof(float));
}

void attend_in_tiles(const Call<bf16>& call, const Queries<bf16>& queries) {
  const int64_t length = call.lengths[queries.b], seen = length + call.M, D = call.D;
  const int64_t width = (seen + KEYS - 1) / KEYS * KEYS;
  float *scores = room_for(TOGETHER * (D / 2 + width)), whole[TOGETHER];
  bf16* pairs = reinterpret_cast<bf16*>(scores + TOGETHER * width);
  for (int64_t i = 0; i < TOGETHER; i++) {
    const bf16* from = queries.from(call, i);
    for (int64_t d = 0; d < D; d += 2) memcpy(pairs + d * TOGETHER + 2 * i, from + d, 2 * sizeof(bf16));
  }
  score_in_tiles(pairs, call.keys + queries.b * call.stride_row + queries.h * D, call.Hkv * D, seen, D, scores);
  for (int64_t at = seen * TOGETHER; at < width * TOGETHER; at++) scores[at] = -INFINITY;
  for (int64_t i = 0; i < TOGETHER; i++)
    for (int64_t m = 0; queries.sees[i] && m < call.M; m++)
      if (!queries.sees[i][m]) scores[(length + m) * TOGETHER + i] = -INFINITY;
  shares_by_key(scores, width, call.scaling, whole);
  gather_all<true>(call, queries, scores, width, whole);
}

#endif

// The new nodes' keys and values of one head.
template <typename T>
void write(const Call<T>& call, int64_t b, int64_t h) {
  const int64_t D = call.D, N = call.N, begin = call.lengths[b] + call.M - N;
  for (int64_t n = 0; n < N; n++) {
    const int64_t at = b * call.stride_row + (begin + n) * call.Hkv * D + h * D;
    const Strides &k = call.of_k, &v = call.of_v;
    memcpy(call.keys + at, call.k + b * k.row + h * k.head + n * k.node, D * sizeof(T));
    memcpy(call.values + at, call.v + b * v.row + h * v.head + n * v.node, D * sizeof(T));
  }
}

template <typename T>
void attend_all(const Call<T>& call) {
  double work = 0;
  for (int64_t b = 0; b < call.B; b++) work += double(call.lengths[b] + call.M) * call.N * call.Hq * call.D * 2;
  const int64_t heads = call.B * call.Hkv, units = (call.Hq / call.Hkv * call.N + TOGETHER - 1) / TOGETHER;
  void (*attend_some)(const Call<T>&, const Queries<T>&) = attend<T>;
#if defined(TILES)
  if constexpr (std::is_same_v<T, bf16>)
    if (call.D % SPAN == 0 && tiles_granted()) attend_some = attend_in_tiles;
#endif
#pragma omp parallel num_threads(at::get_num_threads()) if (work > WORTH_THREADS)
  {
#pragma omp for schedule(static)
    for (int64_t head = 0; head < heads; head++) write(call, head / call.Hkv, head % call.Hkv);
#pragma omp for schedule(static)
    for (int64_t unit = 0; unit < heads * units; unit++) {
      const int64_t head = unit / units;
      attend_some(call, Queries<T>(call, head / call.Hkv, head % call.Hkv, unit % units * TOGETHER));
    }
  }
}

}  // namespace

extern "C" int64_t toolkit_attention_lanes() { return LANES; }

#define TOOLKIT_ATTEND(NAME, T)                                                                                        \
  extern "C" void NAME(const void* q, const void* k, const void* v, void* keys, void* values, void* out,              \
                       const void* lengths, const void* mask, int64_t B, int64_t N, int64_t M, int64_t Hq,            \
                       int64_t Hkv, int64_t D, int64_t stride_row, int64_t q_row, int64_t q_head, int64_t q_node,     \
                       int64_t k_row, int64_t k_head, int64_t k_node, int64_t v_row, int64_t v_head, int64_t v_node,  \
                       double scaling) {                                                                              \
    attend_all(Call<T>{static_cast<const T*>(q), static_cast<const T*>(k), static_cast<const T*>(v),                  \
                       static_cast<T*>(keys), static_cast<T*>(values), static_cast<T*>(out),                          \
                       static_cast<const int64_t*>(lengths), static_cast<const uint8_t*>(mask), B, N, M, Hq, Hkv, D,  \
                       stride_row, {q_row, q_head, q_node}, {k_row, k_head, k_node}, {v_row, v_head, v_node},         \
                       float(scaling)});                                                                              \
  }

TOOLKIT_ATTEND(toolkit_attend_bfloat16, bf16)
TOOLKIT_ATTEND(toolkit_attend_float32, float)
