// Runs the compiled programs of consecutive layers, or those of a whole drafted chain, in one call, and is the attention
// that they call.
//
// A program is a layer: hidden, the tensors that it is called with, its weights -> hidden. From layer to layer, and from
// a layer to the attention of few new nodes (cpu_attention.cpp), nothing asks Python; other attention goes back to it,
// as the operator toolkit::attend.
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

// Names that every copy of this library shares: a program calls the attention of the copy that was loaded first.
namespace toolkit {

typedef void Attend(const void* q, const void* k, const void* v, void* keys, void* values, void* out,
                    const void* lengths, const void* mask, int64_t B, int64_t N, int64_t M, int64_t Hq, int64_t Hkv,
                    int64_t D, int64_t stride_row, int64_t q_row, int64_t q_head, int64_t q_node, int64_t k_row,
                    int64_t k_head, int64_t k_node, int64_t v_row, int64_t v_head, int64_t v_node, double scaling);

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
  TORCH_CHECK(!only_directly, "attention of a drafted chain that is not C++'s");
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

at::Tensor run(Program* program, std::vector<at::Tensor> inputs, at::Tensor** weights, int64_t count) {
  for (int64_t i = 0; i < count; i++) inputs.push_back(*weights[i]);
  return std::move(program->boxed_run(std::move(inputs)).at(0));
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

// Layer l of the `count` that run: programs[l], called with others[others_from[l] .. others_to[l]] and its
// weights[weights_from[l] .. weights_from[l + 1]]. hidden: in [1, T, H], then the last layer's output. Of the
// layers in `taps`, ascending, what enters them goes to `tapped`, as new tensors.
extern "C" int64_t toolkit_run_layers(Program** programs, at::Tensor** weights, const int64_t* weights_from,
                                      at::Tensor** others, const int64_t* others_from, const int64_t* others_to,
                                      int64_t first, int64_t count, AttentionCall* attention, at::Tensor** hidden,
                                      const int64_t* taps, int64_t tap_count, at::Tensor** tapped, char* message,
                                      int64_t size) {
  now = attention;
  running++;
  const int64_t failed = told(message, size, [&] {
    at::Tensor x = **hidden;
    for (int64_t l = 0, tap = 0; l < count; l++) {
      attention->layer = first + l;
      while (tap < tap_count && taps[tap] == first + l) tapped[tap++] = new at::Tensor(x);
      std::vector<at::Tensor> inputs{std::move(x)};
      for (int64_t i = others_from[l]; i < others_to[l]; i++) inputs.push_back(*others[i]);
      x = run(programs[l], std::move(inputs), weights + weights_from[l], weights_from[l + 1] - weights_from[l]);
    }
    **hidden = std::move(x);
  });
  running--;
  now = nullptr;
  return failed;
}

// Drafts of `steps` levels behind what a head has not read yet: given, by `first`, hidden [1, B * N, H] and tokens
// [1, B * N], and of all that is read, pass by pass, positions [L], cos and sin [L, 1, D]. Row b has read lengths[b]
// positions then, and its newest state is that of token roots[b]. pick (a state's best token, [1, B]) and pass (of one
// token a row) follow in turn: a token stands behind all that its row has read, so that each level is a plain decoding
// step, one position further. drafts [steps, B].
extern "C" int64_t toolkit_run_chain(Program* pick, at::Tensor** pick_weights, int64_t pick_count, Program* first,
                                     at::Tensor** first_weights, int64_t first_count, Program* pass,
                                     at::Tensor** pass_weights, int64_t pass_count, at::Tensor** given,
                                     const int64_t* roots, int64_t* lengths, int64_t steps, AttentionCall* attention,
                                     int64_t* drafts, char* message, int64_t size) {
  now = attention;
  only_directly = true;
  running++;
  const int64_t failed = told(message, size, [&] {
    const int64_t B = attention->B;
    const at::Tensor &hidden = *given[0], &tokens = *given[1];
    const auto inputs = [&](at::Tensor x, at::Tensor read, int64_t from) {
      std::vector<at::Tensor> found{std::move(x), std::move(read)};
      for (int i = 2; i < 5; i++) found.push_back(given[i]->narrow(0, from, found[1].size(1)).unsqueeze(0));
      return found;
    };
    attention->layer = 0;
    const at::Tensor states = run(first, inputs(hidden, tokens, 0), first_weights, first_count).contiguous();
    at::Tensor x = at::empty({1, B, states.size(2)}, states.options());
    const int64_t bytes = states.size(2) * states.element_size();
    for (int64_t b = 0; b < B; b++)
      memcpy(static_cast<char*>(x.mutable_data_ptr()) + b * bytes,
             static_cast<const char*>(states.const_data_ptr()) + roots[b] * bytes, bytes);
    attention->lengths = lengths;
    attention->mask = nullptr;
    attention->N = attention->M = 1;
    attention->span = *std::max_element(lengths, lengths + B) + 1;
    for (int64_t level = 1, from = tokens.size(1);; level++, from += B, drafts += B) {
      at::Tensor best = run(pick, {x}, pick_weights, pick_count).contiguous();
      memcpy(drafts, best.const_data_ptr<int64_t>(), B * sizeof(int64_t));
      if (level == steps) break;
      attention->layer = 0;
      x = run(pass, inputs(std::move(x), std::move(best), from), pass_weights, pass_count);
      for (int64_t b = 0; b < B; b++) lengths[b]++;
      attention->span++;
    }
  });
  attention->lengths = nullptr;
  running--;
  only_directly = false;
  now = nullptr;
  return failed;
}
