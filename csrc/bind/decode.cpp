#include <vector>

#include "backend.h"
#include "check.h"

namespace lighttransfer::bind {
namespace {

void check_rows(const Checker& check, const StreamingDecodeParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    if (p.seq_len[b] < 0) continue;
    check.row_value("n_recent", p.n_recent, b, 0, kMaxPosition);
    const int64_t n_slots = p.ring(b).n_slots(int64_t{p.seq_len[b]} + 1);
    check.capacity(p.cache, b, n_slots);
    check.pages(p.cache, b, 0, n_slots);
  }
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor> streaming_decode(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
    const Tensor& seq_len, int64_t n_sink, const Tensor& n_recent, int64_t mass_n_recent,
    const std::optional<Tensor>& block_table, std::optional<double> scale) {
  const Checker check("streaming_decode", q, "q");
  StreamingDecodeParams p{};
  check.shape(q, "q", "[B, 1, H_q, D]", {kAny, 1, kAny, kAny});
  check.shape(k, "k", "[B, 1, H_kv, D]", {q.size(0), 1, kAny, q.size(3)});
  p.batch = q.size(0), p.n_heads = q.size(2), p.n_kv_heads = k.size(2), p.head_dim = q.size(3);
  p.dtype = check.float_dtype(q, "q");
  check.head_dim("q", p.head_dim);
  check.heads(p.n_heads, p.n_kv_heads);
  const ScalarType dtype = q.scalar_type();
  const auto kv_sizes = {p.batch, int64_t{1}, p.n_kv_heads, p.head_dim};
  p.q = check.activation(q, "q", "[B, 1, H_q, D]", {p.batch, 1, p.n_heads, p.head_dim}, dtype);
  p.k = check.activation(k, "k", "[B, 1, H_kv, D]", kv_sizes, dtype);
  p.v = check.activation(v, "v", "[B, 1, H_kv, D]", kv_sizes, dtype);
  check.dtype(k_cache, "k_cache", dtype);
  p.cache = check.kv_cache(k_cache, v_cache, block_table, p.batch, p.n_kv_heads, p.head_dim);
  p.seq_len = check.int32_vector(seq_len, "seq_len", p.batch);
  p.n_recent = check.int32_vector(n_recent, "n_recent", p.batch);
  check.range("n_sink", n_sink, 0, kMaxPosition);
  check.range("mass_n_recent", mass_n_recent, -1, kMaxPosition);
  p.n_sink = n_sink;
  p.window = {n_sink, mass_n_recent};
  p.scale = check.scale(scale, p.head_dim);
  if (Backend::reads_tensors()) check_rows(check, p);
  std::vector<Tensor> copies;
  if constexpr (Backend::kLoadsAligned) {
    check.aligned_rows(k_cache, "k_cache");
    check.aligned_rows(v_cache, "v_cache");
    copies = {align_rows(q, p.q), align_rows(k, p.k), align_rows(v, p.v)};
  }

  Tensor out = new_output(q, {p.batch, 1, p.n_heads, p.head_dim}, dtype);
  Tensor lse = new_output(q, {p.batch, p.n_heads, 1}, ScalarType::Float);
  Tensor mass = p.window.limited() ? new_output(q, {p.batch, p.n_heads, 2}, ScalarType::Float)
                                   : new_output(q, {0}, ScalarType::Float);
  p.out = as_activation(out);
  p.lse = static_cast<float*>(lse.data_ptr());
  if (p.window.limited()) p.mass = static_cast<float*>(mass.data_ptr());
  if (out.numel() > 0) {
    const Backend backend(q);
    Tensor workspace = new_output(q, {backend.workspace_bytes(p)}, ScalarType::Byte);
    p.workspace = workspace.data_ptr();
    backend.run(p);
  }
  return {out, lse, mass};
}

}  // namespace

LT_REGISTER_CPU(streaming_decode)
LT_REGISTER_CUDA(streaming_decode)

}  // namespace lighttransfer::bind
