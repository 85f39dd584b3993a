// Attention of a few new nodes a row over rows of a cache that lie side by side: what a decoding step asks of a CPU, in
// one call. Keys and values of the new nodes are written first.
//
//     keys, values [rows, stride_row]: position p of a row, head h at p * Hkv * D + h * D
//     position   0 .. length-1            length .. length+M-1
//                seen by all new nodes    node m: seen by new node n where mask[b][n][m]; the new ones are the last N
//
// Scores, shares and sums are float32, added in the order of the positions, so that a node's result does not depend on
// the nodes and rows beside it, nor on the number of threads.
//
// Shapes: B rows, N new nodes a row, M nodes a row that are not committed, Hq query heads, Hkv key heads, D head dim.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace at {
int get_num_threads();  // of the calling thread, as torch.set_num_threads left it
}

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int KEYS = 4, TOGETHER = LANES / KEYS;  // scored in one pass: so many keys by so many queries
constexpr double WORTH_THREADS = 1 << 17;         // multiplications of one call; fewer are done before threads have begun

typedef uint16_t bf16;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef bf16 Halves __attribute__((vector_size(2 * LANES)));

inline Floats load(const float* from) {
  Floats out;
  memcpy(&out, from, sizeof out);
  return out;
}

inline Floats load(const bf16* from) {
  Halves halves;
  memcpy(&halves, from, sizeof halves);
  return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

inline void store(float* to, Floats values) { memcpy(to, &values, sizeof values); }

inline void store(bf16* to, Floats values) {  // to the nearest, ties to even
  const Words bits = (Words)values;
  const Halves out = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, Halves);
  memcpy(to, &out, sizeof out);
}

inline float sum(Floats values) {
  float parts[LANES];
  memcpy(parts, &values, sizeof parts);
  for (int step = LANES / 2; step; step /= 2)
    for (int i = 0; i < step; i++) parts[i] += parts[i + step];
  return parts[0];
}

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

// e^x for x <= 0, within 2 units in the last place; 0 up to -87, nan for nan. (Cephes' polynomial on [-ln2/2, ln2/2].)
inline Floats exponential(Floats x) {
  const float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const Floats whole = (x * 1.44269504f + ROUND) - ROUND;
  const Floats rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  Floats e = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  e = e * rest + 8.3334519073e-3f;
  e = e * rest + 4.1665795894e-2f;
  e = e * rest + 1.6666665459e-1f;
  e = e * rest + 5.0000001201e-1f;
  e = e * rest * rest + rest + 1.0f;
  const Ints power = (__builtin_convertvector(whole, Ints) + 127) << 23;
  return (Floats)((Ints)(e * (Floats)power) & ~(x <= -87.0f));
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
template <int PARTS, typename T>
void gather(const float* shares, int64_t width, const T* values, int64_t stride, int64_t seen, const float* whole,
            T* const* to, int64_t from) {
  Floats sums[TOGETHER][PARTS];
  for (auto& of_query : sums)
    for (auto& part : of_query) part = Floats{};
  for (int64_t s = 0; s < seen; s++) {
    Floats value[PARTS];
    for (int j = 0; j < PARTS; j++) value[j] = load(values + s * stride + from + j * LANES);
    for (int i = 0; i < TOGETHER; i++)
      for (int j = 0; j < PARTS; j++) sums[i][j] += shares[i * width + s] * value[j];
  }
  for (int i = 0; i < TOGETHER; i++)
    for (int j = 0; to[i] && j < PARTS; j++) store(to[i] + from + j * LANES, sums[i][j] / whole[i]);
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

// Queries first .. of head h's; `count` are real.
template <typename T>
void attend(const Call<T>& call, int64_t b, int64_t h, int64_t first, int64_t count, const float* queries, float* scores) {
  const int64_t stride = call.Hkv * call.D, seen = call.lengths[b] + call.M;
  const int64_t width = (seen + LANES - 1) / LANES * LANES, groups = call.Hq / call.Hkv;
  const T* keys = call.keys + b * call.stride_row + h * call.D;
  const T* values = call.values + b * call.stride_row + h * call.D;
  score(queries, keys, stride, seen, call.D, scores, width);
  float whole[TOGETHER];
  T* to[TOGETHER];
  for (int i = 0; i < TOGETHER; i++) {
    const int64_t group = (first + i) / call.N, n = (first + i) % call.N;
    to[i] = i < count ? call.out + ((b * call.N + n) * call.Hq + h * groups + group) * call.D : nullptr;
    if (call.mask && i < count) {
      const uint8_t* sees = call.mask + (b * call.N + n) * call.M;
      for (int64_t m = 0; m < call.M; m++)
        if (!sees[m]) scores[i * width + call.lengths[b] + m] = -INFINITY;
    }
    whole[i] = shares_of(scores + i * width, seen, width);
  }
  for (int64_t d = 0; d < call.D;) {
    const int64_t left = (call.D - d) / LANES;
    const int parts = left >= 4 ? 4 : left >= 2 ? 2 : 1;
    auto* of_parts = parts == 4 ? gather<4, T> : parts == 2 ? gather<2, T> : gather<1, T>;
    of_parts(scores, width, values, stride, seen, whole, to, d);
    d += parts * LANES;
  }
}

template <typename T>
void attend_head(const Call<T>& call, int64_t b, int64_t h) {
  const int64_t D = call.D, N = call.N, groups = call.Hq / call.Hkv, count = groups * N;
  const int64_t begin = call.lengths[b] + call.M - N, seen = call.lengths[b] + call.M;
  for (int64_t n = 0; n < N; n++) {
    const int64_t at = b * call.stride_row + (begin + n) * call.Hkv * D + h * D;
    const Strides &k = call.of_k, &v = call.of_v;
    memcpy(call.keys + at, call.k + b * k.row + h * k.head + n * k.node, D * sizeof(T));
    memcpy(call.values + at, call.v + b * v.row + h * v.head + n * v.node, D * sizeof(T));
  }
  static thread_local std::vector<float> held;
  const size_t needed = TOGETHER * (D + seen + LANES);
  if (held.size() < needed) held.resize(needed);
  float *queries = held.data(), *scores = queries + TOGETHER * D;
  for (int64_t first = 0; first < count; first += TOGETHER) {
    const int64_t some = count - first < TOGETHER ? count - first : TOGETHER;
    for (int64_t i = 0; i < TOGETHER; i++) {
      const int64_t at = first + (i < some ? i : 0);
      const T* from = call.q + b * call.of_q.row + (h * groups + at / N) * call.of_q.head + at % N * call.of_q.node;
      for (int64_t d = 0; d < D; d += LANES) store(queries + i * D + d, load(from + d) * call.scaling);
    }
    attend(call, b, h, first, some, queries, scores);
  }
}

template <typename T>
void attend_all(const Call<T>& call) {
  double work = 0;
  for (int64_t b = 0; b < call.B; b++) work += double(call.lengths[b] + call.M) * call.N * call.Hq * call.D * 2;
  const int64_t tasks = call.B * call.Hkv;
#pragma omp parallel for schedule(static) num_threads(at::get_num_threads()) if (work > WORTH_THREADS)
  for (int64_t task = 0; task < tasks; task++) attend_head(call, task / call.Hkv, task % call.Hkv);
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
