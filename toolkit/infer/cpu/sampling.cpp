// The least logit that top-k, top-p and min-p keep, row by row, without a sort of the vocabulary: a histogram of the
// distances to the largest logit finds the bucket of the cut, and only that bucket is sorted.

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "vectors.h"

namespace at {
int get_num_threads();  // of the calling thread, as torch.set_num_threads left it
}

namespace {

constexpr int LAST = 2047;        // the bucket of all that is further from the largest logit
constexpr float PER_NAT = 64.0f;  // buckets
constexpr int64_t WORTH_THREADS = 1 << 15;  // logits
constexpr float LEAST = -std::numeric_limits<float>::infinity();

typedef double Bucket __attribute__((vector_size(16)));  // the sum of e^(logit - largest), the number of tokens

struct Row {
  const float* logits;
  int64_t size;
  float largest = LEAST;
  std::vector<Bucket> buckets;
  std::vector<float> found;  // the logits of the bucket looked at, NaN left out

  int64_t lanes(int64_t first) const { return std::min<int64_t>(LANES, size - first); }

  Floats part(int64_t first) const {
    if (first + LANES <= size) return load(logits + first);
    Floats x = Floats{} + LEAST;
    memcpy(&x, logits + first, 4 * lanes(first));
    return x;
  }

  // The distances of LANES logits in buckets; LAST for NaN too.
  Floats places(int64_t first) const {
    const Floats below = (largest - part(first)) * PER_NAT;
    return below < float(LAST) ? below : Floats{} + float(LAST);
  }

  void read() {
    Floats most = Floats{} + LEAST;
    for (int64_t first = 0; first < size; first += LANES) {
      const Floats x = part(first);
      most = x > most ? x : most;
    }
    for (int i = 0; i < LANES; i++) largest = std::max(largest, most[i]);
    buckets.assign(LAST + 1, Bucket{});
    for (int64_t first = 0; first < size; first += LANES) {
      const Floats place = places(first);
      const Ints number = __builtin_convertvector(place, Ints);
      const Floats mass = exponential(place * (-1 / PER_NAT));
      for (int64_t i = 0; i < lanes(first); i++)
        buckets[number[i]] += Bucket{number[i] < LAST ? mass[i] : std::exp(logits[first + i] - largest), 1.0};
    }
  }

  void find(int bucket) {
    found.clear();
    const Floats low = Floats{} + float(bucket);
    for (int64_t first = 0; first < size; first += LANES) {
      const Floats place = places(first);
      const Ints inside = (place >= low) & (place < low + 1.0f);
      if (!any(inside)) continue;
      for (int64_t i = 0; i < lanes(first); i++)
        if (inside[i] && logits[first + i] == logits[first + i]) found.push_back(logits[first + i]);
    }
  }

  float least_kept(int64_t top_k, double top_p) {
    read();
    float floor = LEAST;
    int end = LAST;  // the last bucket that top-k keeps
    if (top_k > 0 && top_k < size) {
      int64_t left = top_k;
      for (end = 0; end < LAST && left > buckets[end][1]; end++) left -= int64_t(buckets[end][1]);
      find(end);
      if (left <= int64_t(found.size())) {
        std::nth_element(found.begin(), found.begin() + left - 1, found.end(), std::greater<float>());
        floor = found[left - 1];
      }
      buckets[end][0] = 0;
      for (float x : found) buckets[end][0] += x >= floor ? std::exp(x - largest) : 0.0f;
    }
    if (top_p >= 1) return floor;
    double whole = 0, before = 0;
    for (int b = 0; b <= end; b++) whole += buckets[b][0];
    const double goal = top_p * whole;
    int cut = 0;
    for (; cut < end && before + buckets[cut][0] < goal; cut++) before += buckets[cut][0];
    find(cut);
    std::sort(found.begin(), found.end(), std::greater<float>());
    float last = floor;  // rounding may leave the sum of all below the goal
    for (float x : found) {
      if (x < floor) break;
      last = x;
      before += std::exp(x - largest);
      if (before >= goal) break;
    }
    return last;
  }
};

}  // namespace

extern "C" void toolkit_least_kept(const float* logits, const int64_t* top_k, const double* top_p, const float* min_p,
                                   float* floors, int64_t rows, int64_t size) {
#pragma omp parallel for num_threads(at::get_num_threads()) if (rows * size > WORTH_THREADS && rows > 1)
  for (int64_t r = 0; r < rows; r++) {
    Row row{logits + r * size, size};
    const float floor = row.least_kept(top_k[r], top_p[r]);
    floors[r] = std::max(floor, row.largest + float(std::log(double(min_p[r]))));
  }
}
