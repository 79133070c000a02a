#include <vector>

#include "backend.h"
#include "check.h"

namespace lighttransfer::bind {
namespace {

template <class Backend>
Tensor retained_mass(const Tensor& q_last, const Tensor& k, const Tensor& lse_last, int64_t n_sink,
                     int64_t n_recent, std::optional<double> scale,
                     const std::optional<Tensor>& seq_start) {
  const Checker check("retained_mass", q_last, "q_last");
  RetainedMassParams p{};
  check.shape(q_last, "q_last", "[B, S_q, H_q, D]", {kAny, kAny, kAny, kAny});
  p.batch = q_last.size(0), p.n_queries = q_last.size(1), p.n_heads = q_last.size(2);
  p.head_dim = q_last.size(3);
  p.dtype = check.float_dtype(q_last, "q_last");
  const ScalarType dtype = q_last.scalar_type();
  check.head_dim("q_last", p.head_dim);
  p.q = check.activation(q_last, "q_last", "[B, S_q, H_q, D]",
                         {p.batch, p.n_queries, p.n_heads, p.head_dim}, dtype);
  p.k = check.activation(k, "k", "[B, S_k, H_kv, D]", {p.batch, kAny, kAny, p.head_dim}, dtype);
  p.n_keys = k.size(1), p.n_kv_heads = k.size(2);
  check.heads(p.n_heads, p.n_kv_heads);
  check.shape(lse_last, "lse_last", "[B, H_q, S_q]", {p.batch, p.n_heads, p.n_queries});
  check.dtype(lse_last, "lse_last", ScalarType::Float);
  p.lse = static_cast<const float*>(lse_last.data_ptr());
  for (int64_t i = 0; i < 3; ++i) p.lse_strides[i] = lse_last.stride(i);
  check.range("n_sink", n_sink, 0, kMaxPosition);
  check.range("n_recent", n_recent, 0, kMaxPosition);
  p.window = {n_sink, n_recent};
  p.seq_start = check.int32_vector(seq_start, "seq_start", p.batch);
  if (Backend::reads_tensors()) {
    check.row_range("seq_start", p.seq_start, p.batch, 0, p.n_keys);
  }
  p.scale = check.scale(scale, p.head_dim);
  std::vector<Tensor> copies;
  if constexpr (Backend::kLoadsAligned) copies = {align_rows(q_last, p.q), align_rows(k, p.k)};

  Tensor mass = new_output(q_last, {p.batch, p.n_heads, p.n_queries, 2}, ScalarType::Float);
  p.mass = static_cast<float*>(mass.data_ptr());
  if (mass.numel() > 0) Backend(q_last).run(p);
  return mass;
}

template <class Backend>
Tensor lazy_ratio(const Tensor& mass, const std::optional<Tensor>& n_queries) {
  const Checker check("lazy_ratio", mass, "mass");
  LazyRatioParams p{};
  check.shape(mass, "mass", "[B, H_q, n_last, 2]", {kAny, kAny, kAny, 2});
  check.dtype(mass, "mass", ScalarType::Float);
  if (!mass.is_contiguous()) {
    check.fail_value("mass", "be contiguous", "a strided tensor of shape " + describe_shape(mass));
  }
  p.mass = static_cast<const float*>(mass.data_ptr());
  p.batch = mass.size(0), p.n_heads = mass.size(1), p.n_last = mass.size(2);
  p.n_queries = check.int32_vector(n_queries, "n_queries", p.batch);
  if (Backend::reads_tensors()) {
    check.row_range("n_queries", p.n_queries, p.batch, 0, p.n_last);
  }
  Tensor ratio = new_output(mass, {p.batch}, ScalarType::Float);
  p.ratio = static_cast<float*>(ratio.data_ptr());
  if (p.batch > 0) Backend(mass).run(p);
  return ratio;
}

}  // namespace

LT_REGISTER_CPU(retained_mass)
LT_REGISTER_CPU(lazy_ratio)
LT_REGISTER_CUDA(retained_mass)
LT_REGISTER_CUDA(lazy_ratio)

}  // namespace lighttransfer::bind
