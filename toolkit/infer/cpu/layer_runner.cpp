// Runs the compiled programs of consecutive layers, of a whole body, or of all that a head drafts in a round, in one
// call, and is the attention that they call.
//
// A layer's program: hidden, the tensors that it is called with, its weights -> hidden; those of other parts have inputs
// and outputs of their own, and their weights behind. From program to program, and from a layer to the attention of few
// new nodes (cpu_attention.cpp), nothing asks Python; other attention goes back to it, as the operator toolkit::attend.
//
// Shapes: B rows, N new nodes a row, M nodes a row that are not committed, T = B * N tokens side by side, Hq query and
// Hkv key heads, D head dim.

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

// Names that every copy of this library shares: a program calls the attention of the copy that was loaded first.
namespace toolkit {

typedef void Attend(const void* q, const void* k, const void* v, void* keys, void* values, void* out,
                    const void* lengths, const void* mask, int64_t B, int64_t N, int64_t M, int64_t Hq, int64_t Hkv,
                    int64_t D, int64_t stride_row, int64_t q_row, int64_t q_head, int64_t q_node, int64_t k_row,
                    int64_t k_head, int64_t k_node, int64_t v_row, int64_t v_head, int64_t v_node, double scaling);

// cpu_choices.cpp's: logits [R, V] -> log-probabilities and ids of the k best, [R, k].
typedef void TopLogProbs(const void* logits, int64_t R, int64_t V, int64_t k, float* logprobs, int64_t* ids);

// What a forward's layers share, as layer_runner.py fills it in; attend null: Python attends.
struct AttentionCall {
  Attend* attend;
  const int64_t *keys, *values;  // by layer: the address of the first row's keys and values
  const void *lengths, *mask;
  int64_t B, N, M, span, stride_row, bfloat16;
  int64_t layer;  // that runs now
};

thread_local AttentionCall* now = nullptr;
thread_local bool only_directly = false;  // Python's plan does not follow what runs

}  // namespace toolkit

namespace {

using namespace toolkit;
typedef torch::inductor::AOTIModelPackageLoader Program;

std::atomic<int64_t> running{0};

bool is_direct(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const int64_t* window,
               const double* softcap, const AtenTensorHandle* sinks) {
  if (!now || !now->attend || softcap || sinks || (window && *window < now->span)) return false;
  const auto dtype = now->bfloat16 ? at::kBFloat16 : at::kFloat;
  const int64_t T = now->B * now->N;
  const auto fits = [&](const at::Tensor& x) {
    return x.scalar_type() == dtype && x.size(0) == 1 && x.size(2) == T && x.stride(3) == 1;
  };
  return fits(q) && fits(k) && fits(v);
}

// q [1, Hq, T, D], k and v [1, Hkv, T, D] -> [1, T, Hq, D].
at::Tensor attend_directly(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scaling) {
  at::Tensor out = at::empty({1, q.size(2), q.size(1), q.size(3)}, q.options());
  const int64_t N = now->N;
  now->attend(q.const_data_ptr(), k.const_data_ptr(), v.const_data_ptr(),
              reinterpret_cast<void*>(now->keys[now->layer]), reinterpret_cast<void*>(now->values[now->layer]),
              out.mutable_data_ptr(), now->lengths, now->mask, now->B, N, now->M, q.size(1), k.size(1), q.size(3),
              now->stride_row, N * q.stride(2), q.stride(1), q.stride(2), N * k.stride(2), k.stride(1), k.stride(2),
              N * v.stride(2), v.stride(1), v.stride(2), scaling);
  now->layer++;  // of a program with more than one
  return out;
}

at::Tensor attend_by_python(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scaling,
                            const int64_t* window, const double* softcap, const AtenTensorHandle* sinks) {
  TORCH_CHECK(!only_directly, "attention of a draft that is not C++'s");
  static const auto operation = c10::Dispatcher::singleton().findSchemaOrThrow("toolkit::attend", "");
  const auto* sink = sinks ? torch::aot_inductor::tensor_handle_to_tensor_pointer(*sinks) : nullptr;
  torch::jit::Stack stack = {q,
                             k,
                             v,
                             scaling,
                             window ? c10::IValue(*window) : c10::IValue(),
                             softcap ? c10::IValue(*softcap) : c10::IValue(),
                             sink ? c10::IValue(*sink) : c10::IValue()};
  operation.callBoxed(stack);
  return stack.at(0).toTensor();
}

struct Part {  // of a forward: a program and its weights
  Program* program;
  at::Tensor** weights;
  int64_t count;
};

struct Beam {  // a node whose children are looked at
  int64_t candidate;
  float score;
};

std::vector<at::Tensor> run_all(const Part& part, std::vector<at::Tensor> inputs) {
  for (int64_t i = 0; i < part.count; i++) inputs.push_back(*part.weights[i]);
  return part.program->boxed_run(std::move(inputs));
}

at::Tensor run(const Part& part, std::vector<at::Tensor> inputs) {
  return std::move(run_all(part, std::move(inputs)).at(0));
}

struct Taps {  // layers, ascending, of which what enters them goes to `taken`, as new tensors
  const int64_t* layers;
  int64_t count;
  at::Tensor** taken;
};

// x through `count` layers, of which the first is number `first`: layers[l], called with others[from[l] .. to[l]]. What
// leaves the last one enters the one behind it.
at::Tensor run_layers(at::Tensor x, const Part* layers, const at::Tensor* others, const int64_t* from, const int64_t* to,
                      int64_t first, int64_t count, AttentionCall* attention, const Taps& taps) {
  for (int64_t l = 0, tap = 0;; l++) {
    while (tap < taps.count && taps.layers[tap] == first + l) taps.taken[tap++] = new at::Tensor(x);
    if (l == count) return x;
    attention->layer = first + l;
    std::vector<at::Tensor> inputs{std::move(x)};
    inputs.insert(inputs.end(), others + from[l], others + to[l]);
    x = run(layers[l], std::move(inputs));
  }
}

// Rows of H numbers that lie side by side, those named by `rows` -> [1, rows, H].
at::Tensor rows_of(const at::Tensor& table, const std::vector<int64_t>& rows) {
  at::Tensor out = at::empty({1, int64_t(rows.size()), table.size(-1)}, table.options());
  const int64_t bytes = table.size(-1) * table.element_size();
  char* to = static_cast<char*>(out.mutable_data_ptr());
  for (int64_t row : rows) {
    memcpy(to, static_cast<const char*>(table.const_data_ptr()) + row * bytes, bytes);
    to += bytes;
  }
  return out;
}

template <typename Work>
int64_t told(char* message, int64_t size, Work work) {  // 0, or 1 and why
  try {
    work();
    return 0;
  } catch (const c10::Error& error) {
    strncpy(message, error.what_without_backtrace(), size - 1);
  } catch (const std::exception& error) {
    strncpy(message, error.what(), size - 1);
  } catch (...) {
    strncpy(message, "unknown", size - 1);
  }
  return 1;
}

}  // namespace

// toolkit::attend as the programs call it.
extern "C" AOTITorchError aoti_torch_cpu_attend(AtenTensorHandle of_q, AtenTensorHandle of_k, AtenTensorHandle of_v,
                                                double scaling, int64_t* window, double* softcap,
                                                AtenTensorHandle* sinks, AtenTensorHandle* out) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    const auto tensor = torch::aot_inductor::tensor_handle_to_tensor_pointer;
    const at::Tensor &q = *tensor(of_q), &k = *tensor(of_k), &v = *tensor(of_v);
    *out = torch::aot_inductor::tensor_pointer_to_tensor_handle(
        new at::Tensor(is_direct(q, k, v, window, softcap, sinks)
                           ? attend_directly(q, k, v, scaling)
                           : attend_by_python(q, k, v, scaling, window, softcap, sinks)));
  });
}

extern "C" int64_t toolkit_open_program(const char* package, Program** program, char* message, int64_t size) {
  return told(message, size, [&] { *program = new Program(package, "model", false, 1, -1); });
}

extern "C" void toolkit_close_program(Program* program) {
  // While any thread runs one it is left: at exit that may be this one, which nobody waits for.
  if (!running) delete program;
}

extern "C" void toolkit_free_tensors(at::Tensor** tensors, int64_t count) {
  for (int64_t i = 0; i < count; i++) delete tensors[i];
}

// One program alone: inputs [count] -> all its outputs, of which there are at most `room`.
extern "C" int64_t toolkit_run_program(Program* program, at::Tensor** inputs, int64_t count, at::Tensor** outputs,
                                       int64_t room, char* message, int64_t size) {
  running++;
  const int64_t failed = told(message, size, [&] {
    std::vector<at::Tensor> found = run_all({program, inputs, count}, {});
    TORCH_CHECK(int64_t(found.size()) <= room, found.size(), " outputs");
    for (size_t i = 0; i < found.size(); i++) outputs[i] = new at::Tensor(std::move(found[i]));
  });
  running--;
  return failed;
}

// Consecutive layers, as `run_layers` has them. hidden: in [1, T, H], then the last layer's output.
extern "C" int64_t toolkit_run_layers(const Part* layers, at::Tensor** others, int64_t others_count,
                                      const int64_t* others_from, const int64_t* others_to, int64_t first, int64_t count,
                                      AttentionCall* attention, at::Tensor** hidden, const int64_t* taps,
                                      int64_t tap_count, at::Tensor** tapped, char* message, int64_t size) {
  now = attention;
  running++;
  const int64_t failed = told(message, size, [&] {
    std::vector<at::Tensor> held;
    for (int64_t i = 0; i < others_count; i++) held.push_back(*others[i]);
    **hidden = run_layers(**hidden, layers, held.data(), others_from, others_to, first, count, attention,
                          {taps, tap_count, tapped});
  });
  running--;
  now = nullptr;
  return failed;
}

// A whole body. begin: given [2], ids and positions [1, T] -> hidden, and what else layers are called with; order
// [order_count]: which of those are the layers' `others`. end: hidden -> *out.
extern "C" int64_t toolkit_run_body(const Part* begin, const Part* layers, const Part* end, const int64_t* order,
                                    int64_t order_count, const int64_t* others_from, const int64_t* others_to,
                                    int64_t count, AttentionCall* attention, at::Tensor** given, at::Tensor** out,
                                    const int64_t* taps, int64_t tap_count, at::Tensor** tapped, char* message,
                                    int64_t size) {
  now = attention;
  running++;
  const int64_t failed = told(message, size, [&] {
    std::vector<at::Tensor> made = run_all(*begin, {*given[0], *given[1]}), others;
    for (int64_t i = 0; i < order_count; i++) others.push_back(made.at(1 + order[i]));
    at::Tensor x = run_layers(std::move(made[0]), layers, others.data(), others_from, others_to, 0, count, attention,
                              {taps, tap_count, tapped});
    *out = new at::Tensor(run(*end, {std::move(x)}));
  });
  running--;
  now = nullptr;
  return failed;
}

// What a head drafts behind what it has not read yet: all candidates of trees with k beams (EAGLE-2's expansion, as
// `draft_beams` does it), of which a chain's (k = 1) are the chain. given: features [1, B * P, W] (fuse null: hidden) and
// tokens [1, B * P] of what is read first, cos and sin [S, 1, D] by position. Row b has read before[b] positions, and of
// its P the first counts[b] are real; its newest state is that of the last of these. Each level's B * k nodes are read in
// one pass, a chain's behind all that its row has read, so that it is a plain decoding step. fuse, passes and scores: for
// one token, and for more.
//
// widths, depths [B]: how many branches and levels a row keeps (null: all of them); what is beyond scores -inf.
// tokens, parents (candidate numbers; -1: the root), logprobs [B, k + (steps - 1) * k * k].
extern "C" int64_t toolkit_run_drafts(const Part* fuse, const Part* passes, const Part* scores, TopLogProbs* top,
                                      const int64_t* to_target, at::Tensor** given, const int64_t* before,
                                      const int64_t* counts, int64_t steps, int64_t k, const int64_t* widths,
                                      const int64_t* depths, AttentionCall* attention, int64_t* tokens, int64_t* parents,
                                      float* logprobs, char* message, int64_t size) {
  now = attention;
  only_directly = true;
  running++;
  const int64_t failed = told(message, size, [&] {
    constexpr float NOTHING = -std::numeric_limits<float>::infinity();
    const int64_t B = attention->B, P = attention->N, C = k + (steps - 1) * k * k;
    std::vector<int64_t> lengths(B), from(B), places;  // those that a pass reads
    for (int64_t b = 0; b < B; b++) {
      lengths[b] = before[b] + counts[b];
      from[b] = b * P + counts[b] - 1;
      for (int64_t n = 0; n < P; n++) places.push_back(before[b] + n);
    }
    const std::vector<int64_t> roots = from;
    const auto pass = [&](at::Tensor hidden, at::Tensor chosen) {
      const int64_t count = places.size();
      at::Tensor positions = at::empty({1, count}, chosen.options());
      memcpy(positions.mutable_data_ptr(), places.data(), count * sizeof places[0]);
      std::vector<at::Tensor> inputs{std::move(hidden), std::move(chosen), std::move(positions)};
      for (int table : {2, 3}) inputs.push_back(rows_of(*given[table], places).unsqueeze(2));
      attention->layer = 0;
      return run(passes[count > 1], std::move(inputs)).contiguous();
    };
    const auto beyond = [&](int64_t b, int64_t rank, int64_t level) {
      return widths && (rank >= widths[b] || level > depths[b]);
    };
    std::vector<Beam> beams(B * k);
    std::vector<float> best(B * k * k);
    std::vector<int64_t> ids(B * k * k), order(k * k);
    std::vector<uint8_t> sees;  // [B, k, M]: the nodes that each of the newest level sees
    at::Tensor states = pass(fuse ? run(fuse[B * P > 1], {*given[0]}) : *given[0], *given[1]);
    attention->lengths = lengths.data();
    attention->mask = nullptr;
    const int64_t longest = *std::max_element(lengths.begin(), lengths.end());
    for (int64_t level = 1, first = 0, nodes = 0;; level++) {
      // The k best children of every node of the level before, whose state is row from[..] of `states`.
      const int64_t parts = level == 1 ? 1 : k;
      at::Tensor logits = run(scores[B * parts > 1], {level == 1 ? rows_of(states, from) : states}).contiguous();
      top(logits.const_data_ptr(), B * parts, logits.size(2), k, best.data(), ids.data());
      for (int64_t b = 0; b < B; b++)
        for (int64_t i = 0; i < parts; i++)
          for (int64_t j = 0; j < k; j++) {
            const int64_t found = (b * parts + i) * k + j, to = b * C + first + i * k + j;
            const Beam& above = beams[b * k + i];
            tokens[to] = to_target[ids[found]];
            parents[to] = level == 1 ? -1 : above.candidate;
            logprobs[to] = beyond(b, j, level) ? NOTHING : best[found] + (level == 1 ? 0.0f : above.score);
          }
      if (level == steps) break;
      // The k best of these are read.
      from.resize(B * k);
      places.resize(B * k);
      std::vector<uint8_t> seen(B * k * (nodes + k));
      at::Tensor chosen = at::empty({1, B * k}, given[1]->options());
      for (int64_t b = 0; b < B; b++) {
        const float* rivals = logprobs + b * C + first;
        order.resize(parts * k);
        std::iota(order.begin(), order.end(), 0);
        std::partial_sort(order.begin(), order.begin() + k, order.end(), [&](int64_t one, int64_t other) {
          return rivals[one] > rivals[other] || (rivals[one] == rivals[other] && one < other);
        });
        for (int64_t i = 0; i < k; i++) {
          const int64_t candidate = first + order[i], parent = b * k + order[i] / k, node = b * k + i;
          beams[node] = {candidate, beyond(b, i, level) ? NOTHING : rivals[order[i]]};
          chosen.mutable_data_ptr<int64_t>()[node] = tokens[b * C + candidate];
          from[node] = level == 1 ? roots[b] : parent;
          places[node] = before[b] + counts[b] + level - 1;
          uint8_t* sight = seen.data() + node * (nodes + k);
          if (nodes) memcpy(sight, sees.data() + parent * nodes, nodes);
          sight[nodes + i] = 1;
        }
      }
      first += parts * k;
      nodes += k;
      sees = std::move(seen);
      attention->N = k;
      attention->M = k > 1 ? nodes : 1;
      attention->mask = k > 1 ? sees.data() : nullptr;
      attention->span = longest + nodes;
      states = pass(rows_of(states, from), std::move(chosen));
      for (int64_t b = 0; k == 1 && b < B; b++) lengths[b]++;
    }
  });
  attention->lengths = attention->mask = nullptr;
  running--;
  only_directly = false;
  now = nullptr;
  return failed;
}
