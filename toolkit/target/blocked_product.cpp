// y = x w^T + b for bfloat16 weights that a decoding step reads once: a few rows of x against every weight of the model.
//
// Weights lie in blocks of WIDTH outputs, pairs of inputs side by side, so that a block is one stream of memory:
//
//     w [ceil(N / WIDTH), K / 2, WIDTH, 2]      block b, pair p:  w[bW+0][2p] w[bW+0][2p+1]  w[bW+1][2p] w[bW+1][2p+1] ..
//                                               as 32-bit words:  low half: input 2p,  high half: input 2p+1
//
// A bfloat16 is the upper half of a float32, so products are exact in float32 and are added in the order of the inputs.
// A row's result therefore does not depend on the rows beside it, nor on the number of threads.
//
// Shapes: M rows, N outputs, K inputs (even).

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace at {
int get_num_threads();  // of the calling thread, as torch.set_num_threads left it
}

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, TILE = 12;  // 24 sums, 4 weights and an input in 32 registers
#else
constexpr int LANES = 8, TILE = 4;  // 8 sums, 4 weights and an input in 16 registers
#endif
constexpr int WIDTH = 2 * LANES;
constexpr int64_t AHEAD = 8192;       // bytes: the core's own prefetcher stops at the end of a page
constexpr int64_t WIDENED_ALONE = 1 << 14;  // inputs that are widened before threads would have started

typedef uint16_t bf16;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef bf16 Halves __attribute__((vector_size(2 * LANES)));

inline float widen(bf16 value) {
  const uint32_t bits = uint32_t(value) << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

inline Words load(const bf16* from) {
  Words words;
  memcpy(&words, from, sizeof words);
  return words;
}

// To the nearest, ties to even. (A NaN stays one: those that sums of bfloat16 products give end in zeros.)
inline void store(bf16* to, Floats sums, int64_t count) {
  const Words bits = (Words)sums;
  const Halves out = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, Halves);
  memcpy(to, &out, 2 * (count < LANES ? count : LANES));
}

// ROWS rows x [.., K] against one block of weights; y [.., N], of which the block has `count` columns.
template <int ROWS>
void multiply(const bf16* w, const float* x, const bf16* bias, bf16* y, int64_t N, int64_t K, int64_t count) {
  Floats low[ROWS], high[ROWS];  // outputs 0 .. LANES-1 and LANES .. WIDTH-1
  for (int m = 0; m < ROWS; m++) low[m] = high[m] = Floats{};
  for (int64_t k = 0; k < K; k += 2) {
    const bf16* at = w + k * WIDTH;
    const Words first = load(at), second = load(at + WIDTH);
    __builtin_prefetch(reinterpret_cast<const char*>(at) + AHEAD);
    if (WIDTH * 4 > 64) __builtin_prefetch(reinterpret_cast<const char*>(at) + AHEAD + 64);
    const Floats low_even = (Floats)(first << 16), low_odd = (Floats)(first & 0xffff0000u);
    const Floats high_even = (Floats)(second << 16), high_odd = (Floats)(second & 0xffff0000u);
    for (int m = 0; m < ROWS; m++) {
      const float even = x[m * K + k], odd = x[m * K + k + 1];
      low[m] += low_even * even;
      high[m] += high_even * even;
      low[m] += low_odd * odd;
      high[m] += high_odd * odd;
    }
  }
  for (int m = 0; m < ROWS; m++) {
    for (int n = 0; bias && n < LANES; n++) {
      if (n < count) low[m][n] += widen(bias[n]);
      if (n + LANES < count) high[m][n] += widen(bias[n + LANES]);
    }
    store(y + m * N, low[m], count);
    if (count > LANES) store(y + m * N + LANES, high[m], count - LANES);
  }
}

typedef void Multiply(const bf16*, const float*, const bf16*, bf16*, int64_t, int64_t, int64_t);

template <typename>
struct ByRows;
template <int... I>
struct ByRows<std::integer_sequence<int, I...>> {
  static constexpr Multiply* multiply[] = {::multiply<I + 1>...};  // of 1 .. TILE rows
};
typedef ByRows<std::make_integer_sequence<int, TILE>> Tile;

}  // namespace

extern "C" int64_t toolkit_block_width() { return WIDTH; }

// x [M, K], w as above, bias [N] or null -> y [M, N]; all bfloat16, contiguous.
extern "C" void toolkit_blocked_product(const void* x, const void* w, const void* bias, void* y, int64_t M, int64_t N,
                                        int64_t K) {
  const bf16* rows = static_cast<const bf16*>(x);
  static thread_local std::vector<float> held;
  if (held.size() < size_t(M * K)) held.resize(M * K);
  float* wide = held.data();
  const int64_t blocks = (N + WIDTH - 1) / WIDTH;
  if (M * K < WIDENED_ALONE)
    for (int64_t i = 0; i < M * K; i++) wide[i] = widen(rows[i]);
#pragma omp parallel num_threads(at::get_num_threads())
  {
    if (M * K >= WIDENED_ALONE) {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < M * K; i++) wide[i] = widen(rows[i]);
    }
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; block++) {
      const bf16* weights = static_cast<const bf16*>(w) + block * WIDTH * K;
      const int64_t first = block * WIDTH, count = N - first < WIDTH ? N - first : WIDTH;
      const bf16* biases = bias ? static_cast<const bf16*>(bias) + first : nullptr;
      for (int64_t m = 0; m < M; m += TILE) {
        const int64_t some = M - m < TILE ? M - m : TILE;
        Tile::multiply[some - 1](weights, wide + m * K, biases, static_cast<bf16*>(y) + m * N + first, N, K, count);
      }
    }
  }
}

// The same as the compiled layers' programs call it; x [.., K], `outputs` is N.
extern "C" AOTITorchError aoti_torch_cpu_blocked_product(AtenTensorHandle x, AtenTensorHandle w, AtenTensorHandle* bias,
                                                         int64_t outputs, AtenTensorHandle* y) {
  int64_t dims = 0, *sizes = nullptr, strides[8], shape[8];
  bool contiguous = false;
  int32_t dtype = 0;
  void *from = nullptr, *weights = nullptr, *biases = nullptr, *to = nullptr;
  if (aoti_torch_get_dim(x, &dims) || aoti_torch_get_sizes(x, &sizes) || dims < 1 || dims > 8 ||
      aoti_torch_is_contiguous(x, &contiguous) || !contiguous || aoti_torch_get_dtype(x, &dtype) ||
      dtype != aoti_torch_dtype_bfloat16() || aoti_torch_get_data_ptr(x, &from) || aoti_torch_get_data_ptr(w, &weights) ||
      (bias && aoti_torch_get_data_ptr(*bias, &biases)))
    return AOTI_TORCH_FAILURE;
  const int64_t K = sizes[dims - 1];
  int64_t M = 1;
  for (int64_t d = dims - 1, stride = 1; d >= 0; d--) {
    shape[d] = d == dims - 1 ? outputs : sizes[d];
    strides[d] = stride;
    stride *= shape[d];
    if (d < dims - 1) M *= sizes[d];
  }
  if (aoti_torch_empty_strided(dims, shape, strides, dtype, aoti_torch_device_type_cpu(), 0, y) ||
      aoti_torch_get_data_ptr(*y, &to))
    return AOTI_TORCH_FAILURE;
  toolkit_blocked_product(from, weights, biases, to, M, outputs, K);
  return AOTI_TORCH_SUCCESS;
}
