#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>

#include "backend.h"
#include "check.h"
#ifndef LIGHTTRANSFER_SIMULATOR
#include "../cpu/attention.h"
#endif

namespace lighttransfer::bind {
namespace {

struct State {
  Tensor out, lse;
};

template <class Backend>
State attend(const Backend& backend, const Tensor& q, AttentionParams& p) {
  Tensor out = new_output(q, {p.batch, p.n_queries, p.n_heads, p.head_dim}, q.scalar_type());
  Tensor lse = new_output(q, {p.batch, p.n_heads, p.n_queries}, ScalarType::Float);
  p.out = as_activation(out);
  p.lse = static_cast<float*>(lse.data_ptr());
  backend.run(p);
  return {out, lse};
}

#ifndef LIGHTTRANSFER_SIMULATOR
State attend(const CpuBackend&, const Tensor&, AttentionParams& p) {
  const cpu::AttentionResult result = cpu::attend(p);
  return {result.out, result.lse};
}
#endif

// A window beyond the keys there are is the same as one that holds them all; cut to that, sums of
// its sizes cannot overflow.
RetainedWindow checked_window(const Checker& check, int64_t n_sink, int64_t n_recent,
                              int64_t least_n_recent, int64_t n_keys) {
  check.range("n_sink", n_sink, 0, INT64_MAX);
  check.range("n_recent", n_recent, least_n_recent, INT64_MAX);
  return {std::min(n_sink, n_keys), std::min(n_recent, n_keys)};
}

// Everything but the windows, the mass and the outputs.
template <class Backend>
AttentionParams checked_params(const Checker& check, const Tensor& q, const Tensor& k,
                               const Tensor& v, std::optional<double> scale, bool causal,
                               const std::optional<Tensor>& seq_start) {
  AttentionParams p{};
  check.shape(q, "q", "[B, S_q, H_q, D]", {kAny, kAny, kAny, kAny});
  p.batch = q.size(0), p.n_queries = q.size(1), p.n_heads = q.size(2), p.head_dim = q.size(3);
  check.shape(k, "k", "[B, S_k, H_kv, D]", {p.batch, kAny, kAny, p.head_dim});
  p.n_keys = k.size(1), p.n_kv_heads = k.size(2);
  p.dtype = check.float_dtype(q, "q");
  check.head_dim("q", p.head_dim);
  check.heads(p.n_heads, p.n_kv_heads);

  const ScalarType dtype = q.scalar_type();
  p.q = check.activation(q, "q", "[B, S_q, H_q, D]", {p.batch, p.n_queries, p.n_heads, p.head_dim},
                         dtype);
  const auto keys = {p.batch, p.n_keys, p.n_kv_heads, p.head_dim};
  p.k = check.activation(k, "k", "[B, S_k, H_kv, D]", keys, dtype);
  p.v = check.activation(v, "v", "[B, S_k, H_kv, D]", keys, dtype);
  p.scale = check.scale(scale, p.head_dim);
  p.causal = causal;
  p.seq_start = check.int32_vector(seq_start, "seq_start", p.batch);
  if (Backend::reads_tensors()) {
    check.row_range("seq_start", p.seq_start, p.batch, 0, p.n_keys);
  }
  return p;
}

// Without elements, or without keys, there is nothing to run.
template <class Backend>
State run(const Tensor& q, AttentionParams& p) {
  const bool no_output = p.batch == 0 || p.n_queries == 0 || p.n_heads == 0;
  if (!no_output && p.n_keys > 0) return attend(Backend(q), q, p);
  State state{new_output(q, {p.batch, p.n_queries, p.n_heads, p.head_dim}, q.scalar_type()),
              new_output(q, {p.batch, p.n_heads, p.n_queries}, ScalarType::Float)};
  if (!no_output) {
    torch::stable::zero_(state.out);
    torch::stable::fill_(state.lse, -INFINITY);
  }
  return state;
}

template <class Backend>
std::tuple<Tensor, Tensor> prefill_attn(const Tensor& q, const Tensor& k, const Tensor& v,
                                        std::optional<double> scale, bool causal, int64_t n_sink,
                                        int64_t n_recent, const std::optional<Tensor>& seq_start) {
  const Checker check("prefill_attn", q, "q");
  AttentionParams p = checked_params<Backend>(check, q, k, v, scale, causal, seq_start);
  p.mask = checked_window(check, n_sink, n_recent, -1, p.n_keys);
  if (p.mask.limited() && !causal) {
    check.fail_value("n_recent", "be -1 where causal is False", std::to_string(n_recent));
  }
  const State state = run<Backend>(q, p);
  return {state.out, state.lse};
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor> prefill_attn_lazy(const Tensor& q, const Tensor& k,
                                                     const Tensor& v, int64_t n_sink,
                                                     int64_t n_recent, int64_t n_last,
                                                     std::optional<double> scale,
                                                     const std::optional<Tensor>& seq_start) {
  const Checker check("prefill_attn_lazy", q, "q");
  AttentionParams p = checked_params<Backend>(check, q, k, v, scale, true, seq_start);
  p.mask = {0, -1};
  p.window = checked_window(check, n_sink, n_recent, 0, p.n_keys);
  check.range("n_last", n_last, 0, INT32_MAX);
  p.n_last = n_last;
  Tensor mass = new_output(q, {p.batch, p.n_heads, n_last, 2}, ScalarType::Float);
  if (mass.numel() > 0) {
    if (p.n_queries == 0 || p.n_keys == 0) torch::stable::zero_(mass);  // without a launch
    p.mass = static_cast<float*>(mass.data_ptr());
  }
  const State state = run<Backend>(q, p);
  return {state.out, state.lse, mass};
}

}  // namespace

LT_REGISTER_CPU(prefill_attn)
LT_REGISTER_CUDA(prefill_attn)
LT_REGISTER_CPU(prefill_attn_lazy)
LT_REGISTER_CUDA(prefill_attn_lazy)

}  // namespace lighttransfer::bind
