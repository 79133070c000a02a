#include "../state.h"

#include "kernels.h"
#include "parallel.h"
#include "simd.h"

namespace lighttransfer::cpu::LIGHTTRANSFER_ISA {
namespace {

template <class E>
void merge_rows(const MergeStatesParams& p, int64_t begin, int64_t end) {
  using T = typename E::Storage;
  const auto row = [](const Activation& a, int64_t b, int64_t s, int64_t h) {
    return static_cast<T*>(a.data) + b * a.batch_stride + s * a.token_stride + h * a.head_stride;
  };
  for (int64_t i = begin; i < end; ++i) {  // i counts [B, S, H]
    const int64_t h = i % p.n_heads, s = i / p.n_heads % p.n_tokens, b = i / p.n_heads / p.n_tokens;
    const int64_t* sa = p.lse_a_strides;
    const int64_t* sb = p.lse_b_strides;
    const float lse_a = p.lse_a[b * sa[0] + h * sa[1] + s * sa[2]];
    const float lse_b = p.lse_b[b * sb[0] + h * sb[1] + s * sb[2]];
    const MergeWeights w = merge_weights(lse_a, lse_b);
    p.lse[b * p.lse_strides[0] + h * p.lse_strides[1] + s * p.lse_strides[2]] = w.lse;

    const T* a = row(p.out_a, b, s, h);
    const T* c = row(p.out_b, b, s, h);
    T* out = row(p.out, b, s, h);
    if (lse_a == -INFINITY || lse_b == -INFINITY) {
      const T* whole = lse_b == -INFINITY ? a : c;
      for (int64_t d = 0; d < p.head_dim; ++d) out[d] = whole[d];
      continue;
    }
    const Vec weight_a = broadcast(w.weight_a), weight_b = broadcast(w.weight_b);
    int64_t d = 0;
    for (; d + kLanes <= p.head_dim; d += kLanes) {
      store<E>(out + d, fma(weight_a, load<E>(a + d), weight_b * load<E>(c + d)));
    }
    const int64_t rest = p.head_dim - d;
    if (rest > 0) {
      store<E>(out + d, fma(weight_a, load<E>(a + d, rest), weight_b * load<E>(c + d, rest)), rest);
    }
  }
}

}  // namespace

void run(const MergeStatesParams& p) {
  constexpr int64_t kGrain = 256;
  with_element(p.dtype, [&](auto element) {
    parallel_for(0, p.batch * p.n_tokens * p.n_heads, kGrain,
                 [&](int64_t begin, int64_t end) { merge_rows<decltype(element)>(p, begin, end); });
  });
}

}  // namespace lighttransfer::cpu::LIGHTTRANSFER_ISA
