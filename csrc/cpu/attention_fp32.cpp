// Attention over fp16 or bf16 tensors in fp32, a few KV heads at a time: the copies stay small
// beside the inputs of a long prompt.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>

#include "attention.h"
#include "attention_pieces.h"

namespace lighttransfer::cpu {
namespace {

constexpr int64_t kMaxCopyBytes = int64_t{64} << 20;

using Sizes = std::array<int64_t, 4>;  // [B, S, H, D]

// Heads [h, h + sizes[2]) of a.
Tensor heads_of(const Activation& a, int64_t h, const Sizes& sizes, DType dtype) {
  const Sizes strides{a.batch_stride, a.token_stride, a.head_stride, 1};
  return torch::stable::from_blob(static_cast<char*>(a.data) + 2 * h * a.head_stride, sizes,
                                  strides, kCpu, scalar_type(dtype));
}

Tensor widened(const Activation& a, int64_t h, const Sizes& sizes, DType dtype) {
  Tensor copy = torch::stable::empty(sizes, ScalarType::Float);
  torch::stable::copy_(copy, heads_of(a, h, sizes, dtype));
  return copy;
}

Activation activation(const Tensor& t) {
  return {t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

}  // namespace

AttentionResult attend_in_fp32(const AttentionParams& p) {
  const int64_t group = p.n_heads / p.n_kv_heads;
  const int64_t bytes = 8 * p.batch * p.head_dim * (p.n_queries * group + p.n_keys);
  const int64_t step = std::clamp<int64_t>(kMaxCopyBytes / bytes, 1, p.n_kv_heads);
  const Sizes out_sizes{p.batch, p.n_queries, p.n_heads, p.head_dim};
  const std::array<int64_t, 3> lse_sizes{p.batch, p.n_heads, p.n_queries};
  AttentionResult result{torch::stable::empty(out_sizes, scalar_type(p.dtype)),
                         torch::stable::empty(lse_sizes, ScalarType::Float)};
  for (int64_t h = 0; h < p.n_kv_heads; h += step) {
    AttentionParams part = p;
    part.dtype = DType::kFloat32;
    part.n_kv_heads = std::min(step, p.n_kv_heads - h);
    part.n_heads = part.n_kv_heads * group;
    const Sizes queries{p.batch, p.n_queries, part.n_heads, p.head_dim};
    const Sizes keys{p.batch, p.n_keys, part.n_kv_heads, p.head_dim};
    const Tensor q = widened(p.q, h * group, queries, p.dtype);
    const Tensor k = widened(p.k, h, keys, p.dtype), v = widened(p.v, h, keys, p.dtype);
    part.q = activation(q), part.k = activation(k), part.v = activation(v);
    const AttentionResult heads = attend_pieces(part);
    Tensor out = heads_of(activation(result.out), h * group, queries, p.dtype);
    torch::stable::copy_(out, heads.out);
    Tensor lse = torch::stable::narrow(result.lse, 1, h * group, part.n_heads);
    torch::stable::copy_(lse, heads.lse);
  }
  return result;
}

}  // namespace lighttransfer::cpu
