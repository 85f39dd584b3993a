// A decoder layer of Llama and the families that share it, or of a draft head, in one call for few new nodes per row
// (attention.h), or in two calls around another attention.
//
//     before   qkv = norm(x) w^T + b; queries and keys are rotated in place, after their own norms (Qwen3)
//              EAGLE-3's first layer reads (norm(e), norm(x)) of 2 H in place of norm(x); e: the token's embedding
//     after    h = x + attended w^T;  out = h + (silu(g) * u) w^T, where g, u = norm(h) w^T
//
// Threads start once a call. Every result is rounded to bfloat16 where transformers, or the head's own layer, rounds it.
// A row's result does not depend on the other rows, nor on the number of threads (see product.h).
//
// Shapes: M rows, H hidden size, Hq/Hkv heads of D, I intermediate size; all bfloat16 and contiguous.

#include <algorithm>
#include <cmath>

#include "attention.h"
#include "product.h"

namespace at {
int get_num_threads();  // of the calling thread, as torch.set_num_threads left it
}

namespace {

// rounded: to bfloat16 before the weight too, as in transformers.
struct Norm {
  const bf16* weight;  // null: there is none
  double eps;
  int64_t rounded;
};

// Its fields, in this order, are those of decoder_layer.py. of_embeds: has a weight if the layer reads embeddings too.
// adds_normed: the residual is norm(x), not x.
struct Layer {
  Linear qkv, out, gate_up, down;
  Norm before, after, queries, keys, of_embeds;
  int64_t H, Hq, Hkv, D, I, adds_normed;
};

// The rows' inputs: x and embeds [M, H]; cos and sin [M, D], `stride` from row to row.
struct In {
  const bf16 *x, *embeds, *cos, *sin;
  int64_t stride;
};

// x [size] -> to, which may be x.
inline void rms_norm(const bf16* x, const Norm& norm, int64_t size, bf16* to) {
  Floats squares = {};
  for (int64_t i = 0; i < size; i += LANES) squares += load(x + i) * load(x + i);
  const Floats factor = Floats{} + 1 / std::sqrt(sum(squares) / size + float(norm.eps));
  for (int64_t i = 0; i < size; i += LANES) {
    const Floats scaled = load(x + i) * factor;
    store(to + i, (norm.rounded ? rounded_to_bf16(scaled) : scaled) * load(norm.weight + i));
  }
}

// One head [D] in place; cos and sin [D].
inline void rotate(bf16* head, const bf16* cos, const bf16* sin, int64_t D) {
  for (int64_t i = 0; i < D / 2; i += LANES) {
    bf16* const other = head + D / 2 + i;
    const Floats low = load(head + i), high = load(other);
    store(head + i, rounded_to_bf16(low * load(cos + i)) + rounded_to_bf16(-high * load(sin + i)));
    store(other, rounded_to_bf16(high * load(cos + D / 2 + i)) + rounded_to_bf16(low * load(sin + D / 2 + i)));
  }
}

inline Floats silu(Floats x) {
  const Floats e = exponential(x > 0 ? -x : x);  // of -|x|: no overflow
  return (x > 0 ? x : x * e) / (1 + e);
}

// Rooms of the calling thread, for its whole team; they grow. whole: the attention's too.
struct Room {
  std::vector<bf16> normed, qkv, attended, middle, both, gated;
  std::vector<char> inputs;

  void reserve(int64_t M, const Layer& layer, bool whole) {
    const auto grow = [](auto& held, int64_t size) {
      if (int64_t(held.size()) < size) held.resize(size);
    };
    grow(normed, M * layer.qkv.K);  // at least H
    if (whole) {
      grow(qkv, M * (layer.Hq + 2 * layer.Hkv) * layer.D);
      grow(attended, M * layer.Hq * layer.D);
    }
    grow(middle, M * layer.H);
    grow(both, M * 2 * layer.I);
    grow(gated, M * layer.I);
    int64_t widest = 0;
    for (const Linear* one : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down}) {
      const bool converts = one->scale ? Inputs<Int8>{nullptr, M, one->K, nullptr}.converts()
                                       : Inputs<Bfloat16>{nullptr, M, one->K, nullptr}.converts();
      if (converts) widest = std::max(widest, one->K);
    }
    grow(inputs, 4 * M * widest);
  }
};

Room& room_for(int64_t M, const Layer& layer, bool whole) {
  static thread_local Room room;
  room.reserve(M, layer, whole);
  return room;
}

void team_product(const Linear& linear, const bf16* x, int64_t M, Room& room, bf16* y, const bf16* residual) {
  if (linear.scale)
    team_product<Int8>(linear, Inputs<Int8>{x, M, linear.K, room.inputs.data()}, true, y, residual);
  else
    team_product<Bfloat16>(linear, Inputs<Bfloat16>{x, M, linear.K, room.inputs.data()}, true, y, residual);
}

// x [M, H] -> to [M, H], `stride` from row to row.
void team_norm(const bf16* x, const Norm& norm, int64_t M, int64_t H, bf16* to, int64_t stride) {
#pragma omp for schedule(static)
  for (int64_t m = 0; m < M; m++) rms_norm(x + m * H, norm, H, to + m * stride);
}

// gates and ups, both [M, 2 I] -> silu(gates) * ups [M, I].
void team_gated(const bf16* both, int64_t M, int64_t I, bf16* to) {
#pragma omp for schedule(static)
  for (int64_t at = 0; at < M * I / LANES; at++) {
    const int64_t m = at * LANES / I, i = at * LANES % I;
    const bf16* const gates = both + m * 2 * I + i;
    store(to + m * I + i, rounded_to_bf16(silu(load(gates))) * load(gates + I));
  }
}

// The input of q, k and v: x itself, or [M, K] of its norm, after that of the embeddings if there are some.
const bf16* team_inputs(const Layer& layer, const In& in, int64_t M, Room& room) {
  if (!layer.before.weight) return in.x;
  bf16* const normed = room.normed.data();
  const int64_t K = layer.qkv.K;
  if (layer.of_embeds.weight) team_norm(in.embeds, layer.of_embeds, M, layer.H, normed, K);
  team_norm(in.x, layer.before, M, layer.H, normed + (K - layer.H), K);
  return normed;
}

// -> qkv [M, Hq + 2 Hkv, D].
void team_before(const Layer& layer, const In& in, bf16* qkv, int64_t M, Room& room) {
  const int64_t D = layer.D, heads = layer.Hq + layer.Hkv;
  team_product(layer.qkv, team_inputs(layer, in, M, room), M, room, qkv, nullptr);
#pragma omp for schedule(static)
  for (int64_t at = 0; at < M * heads; at++) {
    const int64_t m = at / heads, h = at % heads;
    bf16* const head = qkv + (m * (heads + layer.Hkv) + h) * D;
    const Norm& norm = h < layer.Hq ? layer.queries : layer.keys;
    if (norm.weight) rms_norm(head, norm, D, head);
    rotate(head, in.cos + m * in.stride, in.sin + m * in.stride, D);
  }
}

// x [M, H], attended [M, Hq * D] -> y [M, H].
void team_after(const Layer& layer, const bf16* x, const bf16* attended, bf16* y, int64_t M, Room& room) {
  bf16 *const middle = room.middle.data(), *const normed = room.normed.data(), *const both = room.both.data();
  if (layer.adds_normed) team_norm(x, layer.before, M, layer.H, middle, layer.H);
  team_product(layer.out, attended, M, room, middle, layer.adds_normed ? middle : x);
  team_norm(middle, layer.after, M, layer.H, normed, layer.H);
  team_product(layer.gate_up, normed, M, room, both, nullptr);
  team_gated(both, M, layer.I, room.gated.data());
  team_product(layer.down, room.gated.data(), M, room, y, middle);
}

// Its fields, in this order, are those of attention.py; see Call.
struct Rows {
  const int64_t *lengths, *table;
  const uint8_t* mask;
  int64_t B, N, M, table_row, tiles;
};

}  // namespace

extern "C" void toolkit_rms_norm(const bf16* x, const bf16* weight, double eps, bf16* y, int64_t M, int64_t H) {
  const Norm norm = {weight, eps, false};
#pragma omp parallel for num_threads(at::get_num_threads()) if (M > 32)
  for (int64_t m = 0; m < M; m++) rms_norm(x + m * H, norm, H, y + m * H);
}

extern "C" void toolkit_before_attention(const Layer* layer, const bf16* x, const bf16* embeds, const bf16* cos,
                                         const bf16* sin, int64_t stride, bf16* qkv, int64_t M) {
  Room& room = room_for(M, *layer, false);
  const In in = {x, embeds, cos, sin, stride};
#pragma omp parallel num_threads(at::get_num_threads())
  team_before(*layer, in, qkv, M, room);
}

extern "C" void toolkit_after_attention(const Layer* layer, const bf16* x, const bf16* attended, bf16* y, int64_t M) {
  Room& room = room_for(M, *layer, false);
#pragma omp parallel num_threads(at::get_num_threads())
  team_after(*layer, x, attended, y, M, room);
}

// keys and values: the layer's cache. x, embeds and y [B * N, H].
extern "C" void toolkit_decoder_layer(const Layer* of, const Rows* rows, const bf16* x, const bf16* embeds,
                                      const bf16* cos, const bf16* sin, int64_t stride, bf16* keys, bf16* values,
                                      bf16* y, double scaling) {
  const Layer& layer = *of;
  const In in = {x, embeds, cos, sin, stride};
  const int64_t D = layer.D, M = rows->B * rows->N, node = (layer.Hq + 2 * layer.Hkv) * D;
  Room& room = room_for(M, layer, true);
  bf16 *const qkv = room.qkv.data(), *const attended = room.attended.data();
  const Strides strides = {rows->N * node, D, node};
  const Call<bf16> call = {qkv, qkv + layer.Hq * D, qkv + (layer.Hq + layer.Hkv) * D, keys, values, attended,
                           rows->lengths, rows->table, rows->mask, rows->B, rows->N, rows->M, layer.Hq, layer.Hkv, D,
                           rows->table_row, strides, strides, strides, rows->tiles != 0, float(scaling)};
#pragma omp parallel num_threads(at::get_num_threads())
  {
    team_before(layer, in, qkv, M, room);
    team_attend(call);
    team_after(layer, x, attended, y, M, room);
  }
}
