// Choices from logits and draft trees on a CPU: the best token, the best children, the tree of the best candidates, the
// walk. reference.py and tree_reference.py define what each of them gives; PyTorch's operators take many calls, or long.
//
// Shapes: B rows, N nodes a row (root included), A = the tree's depth + 1, C candidates a row in level order, V scores.

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "vectors.h"

namespace at {
int get_num_threads();  // of the calling thread, as torch.set_num_threads left it
}

namespace {

constexpr float NOTHING = -std::numeric_limits<float>::infinity();
constexpr int64_t WORTH_THREADS = 1 << 19;  // scores that are looked at before threads would have begun

// The last of V numbers, and `rest` behind them.
template <typename T>
inline Floats load_some(const T* from, int64_t count, float rest) {
  Floats out = Floats{} + rest;
  for (int64_t i = 0; i < count; i++) out[i] = widen(from[i]);
  return out;
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

inline float largest(Floats values) {
  float parts[LANES];
  memcpy(parts, &values, sizeof parts);
  return *std::max_element(parts, parts + LANES);
}

// ln of the sum of e^x; nan where an x is nan or +inf, or all are -inf.
template <typename T>
float log_sum_exp(const T* x, int64_t V) {
  const int64_t whole = V - V % LANES;
  Floats most = load_some(x + whole, V - whole, NOTHING);
  for (int64_t v = 0; v < whole; v += LANES) most = larger(load(x + v), most);
  const float top = largest(most);
  Floats sums = exponential(load_some(x + whole, V - whole, NOTHING) - top);
  for (int64_t v = 0; v < whole; v += LANES) sums += exponential(load(x + v) - top);
  return top + std::log(sum(sums));
}

// The k largest of x, the earlier one of equals first; nan counts as -inf.
template <typename T>
void best_of(const T* x, int64_t V, int64_t k, float* values, int64_t* ids) {
  int64_t held = 0;
  const auto look = [&](int64_t v) {
    const float given = widen(x[v]), value = given == given ? given : NOTHING;
    if (held == k && !(value > values[k - 1])) return;
    int64_t at = held < k ? held++ : k - 1;
    for (; at > 0 && value > values[at - 1]; at--) {
      values[at] = values[at - 1];
      ids[at] = ids[at - 1];
    }
    values[at] = value;
    ids[at] = v;
  };
  constexpr int64_t BLOCK = 4 * LANES;
  int64_t v = 0;
  for (; v < std::min(k, V); v++) look(v);
  for (; v + BLOCK <= V; v += BLOCK) {
    Floats most = load(x + v);
    for (int i = 1; i < 4; i++) most = larger(load(x + v + i * LANES), most);
    if (!any(most > values[k - 1])) continue;
    for (int64_t i = v; i < v + BLOCK; i++) look(i);
  }
  for (; v < V; v++) look(v);
}

// The largest of V numbers, the first of equals; nan counts as the largest, as in PyTorch.
template <typename T>
int64_t argmax(const T* x, int64_t V) {
  constexpr int64_t BLOCK = 4 * LANES;
  float most = NOTHING;
  int64_t best = 0, v = 0;
  const auto look = [&](int64_t end) {  // false: it is known already
    for (; v < end; v++) {
      const float value = widen(x[v]);
      if (value != value) return best = v, false;
      if (value > most) {
        most = value;
        best = v;
      }
    }
    return true;
  };
  while (v + BLOCK <= V) {
    Floats a, b, c, d;
    load(x + v, a, b);
    load(x + v + 2 * LANES, c, d);
    const Ints above = ~((a <= most) & (b <= most) & (c <= most) & (d <= most));  // nan is above, too
    if (!any(above))
      v += BLOCK;
    else if (!look(v + BLOCK))
      return best;
  }
  look(V);
  return best;
}

template <typename T>
void argmax_rows(const T* logits, int64_t R, int64_t V, int64_t* ids) {
#pragma omp parallel for num_threads(at::get_num_threads()) if (R > 1 && R * V >= WORTH_THREADS)
  for (int64_t r = 0; r < R; r++) ids[r] = argmax(logits + r * V, V);
}

template <typename T>
void top_log_probs(const T* logits, int64_t R, int64_t V, int64_t k, float* scores, int64_t* ids) {
#pragma omp parallel for num_threads(at::get_num_threads()) if (R > 1 && R * V >= WORTH_THREADS)
  for (int64_t r = 0; r < R; r++) {
    const T* row = logits + r * V;
    best_of(row, V, k, scores + r * k, ids + r * k);
    const float whole = log_sum_exp(row, V);
    for (float* at = scores + r * k; at < scores + (r + 1) * k; at++) {
      const float score = *at - whole;
      *at = score == score ? std::min(score, 0.0f) : NOTHING;
    }
  }
}

}  // namespace

// logits [R, V] -> the most probable tokens [R].
extern "C" void toolkit_argmax_float32(const float* logits, int64_t R, int64_t V, int64_t* ids) {
  argmax_rows(logits, R, V, ids);
}

extern "C" void toolkit_argmax_bfloat16(const bf16* logits, int64_t R, int64_t V, int64_t* ids) {
  argmax_rows(logits, R, V, ids);
}

// logits [R, V] -> log-probabilities and ids of the k best, [R, k]; k <= V.
extern "C" void toolkit_top_log_probs_float32(const float* logits, int64_t R, int64_t V, int64_t k, float* scores,
                                              int64_t* ids) {
  top_log_probs(logits, R, V, k, scores, ids);
}

extern "C" void toolkit_top_log_probs_bfloat16(const bf16* logits, int64_t R, int64_t V, int64_t k, float* scores,
                                               int64_t* ids) {
  top_log_probs(logits, R, V, k, scores, ids);
}

// `tree_reference.rank_candidates`: C candidates of every row -> trees of `count` of them and the root. limits [B]: as
// `nodes` there; null where all rows have count + 1.
extern "C" void toolkit_rank_candidates(const int64_t* roots, const int64_t* tokens, const int64_t* parents,
                                        const int64_t* levels, const float* scores, const int64_t* limits, int64_t B,
                                        int64_t C, int64_t count, int64_t* node_tokens, int64_t* node_parents,
                                        int64_t* depths, bool* mask, bool* valid) {
  const int64_t N = count + 1;
  std::vector<int64_t> order(C), node_of(C);
  std::vector<bool> good(C);
  for (int64_t b = 0; b < B; b++, tokens += C, parents += C, scores += C) {
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + count, order.end(), [&](int64_t one, int64_t other) {
      return scores[one] > scores[other] || (scores[one] == scores[other] && one < other);
    });
    for (int64_t rank = 0; rank < count; rank++)
      good[order[rank]] = !limits || (rank < limits[b] - 1 && scores[order[rank]] > NOTHING);
    std::sort(order.begin(), order.begin() + count);
    const auto put = [&](int64_t node, int64_t token, int64_t parent, int64_t depth, bool real) {
      node_tokens[b * N + node] = token;
      node_parents[b * N + node] = parent;
      depths[b * N + node] = depth;
      valid[b * N + node] = real;
      bool* sees = mask + (b * N + node) * N;
      if (real && parent >= 0)
        memcpy(sees, mask + (b * N + parent) * N, N);
      else
        memset(sees, 0, N);
      sees[node] = true;
    };
    put(0, roots[b], -1, 0, true);
    for (int64_t node = 1; node < N; node++) {
      const int64_t from = order[node - 1];
      node_of[from] = node;
      put(node, tokens[from], parents[from] < 0 ? 0 : node_of[parents[from]], levels[from], good[from]);
    }
  }
}

// `tree_reference.follow_choices`; parents and depths null: chains. numbers [B, 3 + 3 * A] as `Followed` has them.
extern "C" void toolkit_follow_choices(const int64_t* tokens, const int64_t* parents, const int64_t* depths,
                                       const bool* valid, const int64_t* choices, int64_t B, int64_t N, int64_t A,
                                       int64_t* numbers) {
  for (int64_t b = 0; b < B; b++, tokens += N, valid += N, choices += N, numbers += 3 + 3 * A) {
    int64_t *path = numbers + 3, *chosen = path + A, *ranks = chosen + A, accepted = 0, offered = 0, deepest = 0;
    std::fill(path, path + A, 0);
    std::fill(chosen, chosen + A, choices[0]);
    std::fill(ranks, ranks + A, 0);
    int64_t at = 0, rank = 0;
    for (int64_t node = 1; node < N; node++) {  // parents come before their children
      if (!valid[node]) continue;
      offered++;
      deepest = std::max(deepest, depths ? depths[b * N + node] : node);
      if ((parents ? parents[b * N + node] : node - 1) != at) continue;
      if (tokens[node] != choices[at]) {
        rank++;
        continue;
      }
      if (++accepted < A) {
        path[accepted] = node;
        chosen[accepted] = choices[node];
        ranks[accepted] = rank;
      }
      at = node;
      rank = 0;
    }
    numbers[0] = accepted;
    numbers[1] = offered;
    numbers[2] = deepest;
  }
}
