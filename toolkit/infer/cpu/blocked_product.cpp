// The product of rows with a weight in blocks (product.h), by threads of its own.

#include "product.h"

namespace at {
int get_num_threads();  // of the calling thread, as torch.set_num_threads left it
}

namespace {

constexpr int64_t CONVERTED_ALONE = 1 << 14;  // fewer inputs are converted before threads start

template <typename Weights>
void product(const Linear& linear, const bf16* x, bf16* y, int64_t M) {
  Inputs<Weights> inputs = {x, M, linear.K, nullptr};
  static thread_local std::vector<char> held;
  if (inputs.converts() && held.size() < size_t(4 * M * linear.K)) held.resize(4 * M * linear.K);
  inputs.room = held.data();
  const bool alone = M * linear.K < CONVERTED_ALONE;
  if (alone && inputs.converts()) inputs.convert_all();
#pragma omp parallel num_threads(at::get_num_threads())
  team_product<Weights>(linear, inputs, !alone, y, nullptr);
}

}  // namespace

extern "C" int64_t toolkit_block_width() { return WIDTH; }

// How many inputs of one output lie side by side in blocks of int8 weights.
extern "C" int64_t toolkit_together(int64_t K) { return in_tiles<Int8>(K) ? 2 : 1; }

extern "C" int64_t toolkit_uses_tiles() {
#if defined(TILES)
  return tiles_granted();
#else
  return 0;
#endif
}

// x [M, K], bias [N] or null -> y [M, N], all bfloat16; scale [N] float32 or null. All tensors are contiguous. The weights
// are int8 if there is a scale, else bfloat16.
extern "C" void toolkit_blocked_product(const void* x, const void* w, const void* scale, const void* bias, void* y,
                                        int64_t M, int64_t N, int64_t K) {
  const Linear linear = {static_cast<const char*>(w), static_cast<const float*>(scale), static_cast<const bf16*>(bias), N,
                         K};
  if (scale)
    product<Int8>(linear, static_cast<const bf16*>(x), static_cast<bf16*>(y), M);
  else
    product<Bfloat16>(linear, static_cast<const bf16*>(x), static_cast<bf16*>(y), M);
}
