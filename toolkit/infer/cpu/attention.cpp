// The attention of attention.h, by threads of its own.

#include "attention.h"

namespace at {
int get_num_threads();  // of the calling thread, as torch.set_num_threads left it
}

namespace {

constexpr double WORTH_THREADS = 1 << 17;  // multiplications per call; fewer take less time than starting threads

template <typename T>
void attend_all(const Call<T>& call) {
  double work = 0;
  for (int64_t b = 0; b < call.B; b++) work += double(call.lengths[b] + call.M) * call.N * call.Hq * call.D * 2;
#pragma omp parallel num_threads(at::get_num_threads()) if (work > WORTH_THREADS)
  team_attend(call);
}

}  // namespace

extern "C" int64_t toolkit_attention_lanes() { return LANES; }
extern "C" int64_t toolkit_attention_page() { return PAGE; }

#define TOOLKIT_ATTEND(NAME, T)                                                                                        \
  extern "C" void NAME(const void* q, const void* k, const void* v, void* keys, void* values, void* out,              \
                       const void* lengths, const void* table, const void* mask, int64_t B, int64_t N, int64_t M,     \
                       int64_t Hq, int64_t Hkv, int64_t D, int64_t table_row, int64_t q_row, int64_t q_head,          \
                       int64_t q_node, int64_t k_row, int64_t k_head, int64_t k_node, int64_t v_row, int64_t v_head,  \
                       int64_t v_node, int64_t tiles, double scaling) {                                               \
    attend_all(Call<T>{static_cast<const T*>(q), static_cast<const T*>(k), static_cast<const T*>(v),                  \
                       static_cast<T*>(keys), static_cast<T*>(values), static_cast<T*>(out),                          \
                       static_cast<const int64_t*>(lengths), static_cast<const int64_t*>(table),                      \
                       static_cast<const uint8_t*>(mask), B, N, M, Hq, Hkv, D, table_row, {q_row, q_head, q_node},    \
                       {k_row, k_head, k_node}, {v_row, v_head, v_node}, tiles != 0, float(scaling)});                \
  }

TOOLKIT_ATTEND(toolkit_attend_bfloat16, bf16)
TOOLKIT_ATTEND(toolkit_attend_float32, float)
