#include "backend.h"
#include "check.h"

namespace lighttransfer::bind {
namespace {

template <class Backend>
std::tuple<Tensor, Tensor> merge_states(const Tensor& out_a, const Tensor& lse_a,
                                        const Tensor& out_b, const Tensor& lse_b) {
  const Checker check("merge_states", out_a, "out_a");
  MergeStatesParams p{};
  check.shape(out_a, "out_a", "[B, S, H, D]", {kAny, kAny, kAny, kAny});
  const int64_t b = out_a.size(0), s = out_a.size(1), h = out_a.size(2), d = out_a.size(3);
  p.dtype = check.float_dtype(out_a, "out_a");
  const ScalarType dtype = out_a.scalar_type();
  p.out_a = check.activation(out_a, "out_a", "[B, S, H, D]", {b, s, h, d}, dtype);
  p.out_b = check.activation(out_b, "out_b", "[B, S, H, D]", {b, s, h, d}, dtype);

  const auto lse = [&](const Tensor& t, const char* argument, int64_t* strides) {
    check.shape(t, argument, "[B, H, S]", {b, h, s});
    check.dtype(t, argument, ScalarType::Float);
    for (int64_t i = 0; i < 3; ++i) strides[i] = t.stride(i);
    return static_cast<const float*>(t.data_ptr());
  };
  p.lse_a = lse(lse_a, "lse_a", p.lse_a_strides);
  p.lse_b = lse(lse_b, "lse_b", p.lse_b_strides);

  Tensor out = new_output(out_a, {b, s, h, d}, dtype);
  Tensor lse_out = new_output(out_a, {b, h, s}, ScalarType::Float);
  p.out = as_activation(out);
  p.lse = static_cast<float*>(lse_out.data_ptr());
  p.lse_strides[0] = h * s, p.lse_strides[1] = s, p.lse_strides[2] = 1;
  p.batch = b, p.n_tokens = s, p.n_heads = h, p.head_dim = d;
  if (out.numel() > 0 || lse_out.numel() > 0) Backend(out_a).run(p);
  return {out, lse_out};
}

}  // namespace

LT_REGISTER_CPU(merge_states)
LT_REGISTER_CUDA(merge_states)

}  // namespace lighttransfer::bind
