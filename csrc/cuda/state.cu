#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../state.h"
#include "kernels.h"
#include "launch.h"

namespace lighttransfer::cuda {
namespace {

constexpr int kVector = 8;  // elements in 16 bytes; head_dim's granule
constexpr int kThreads = 256;

// One thread merges one granule of 8 elements of one row; the thread of a row's first granule also
// writes the row's lse.
template <class T>
__global__ void merge_states_kernel(MergeStatesParams p, int64_t n_granules, int granules_per_row) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n_granules) return;
  const int64_t row = i / granules_per_row;
  const int granule = static_cast<int>(i % granules_per_row);
  const int64_t h = row % p.n_heads, s = row / p.n_heads % p.n_tokens,
                b = row / p.n_heads / p.n_tokens;

  const float lse_a =
      p.lse_a[b * p.lse_a_strides[0] + h * p.lse_a_strides[1] + s * p.lse_a_strides[2]];
  const float lse_b =
      p.lse_b[b * p.lse_b_strides[0] + h * p.lse_b_strides[1] + s * p.lse_b_strides[2]];
  const MergeWeights w = merge_weights(lse_a, lse_b);
  if (granule == 0) {
    p.lse[b * p.lse_strides[0] + h * p.lse_strides[1] + s * p.lse_strides[2]] = w.lse;
  }

  const auto at = [&](const Activation& a) {
    return static_cast<T*>(a.data) + b * a.batch_stride + s * a.token_stride + h * a.head_stride +
           granule * kVector;
  };
  const T *from_a = at(p.out_a), *from_b = at(p.out_b);
  T* out = at(p.out);
  const bool one_side = lse_a == -INFINITY || lse_b == -INFINITY;
  const T* whole = lse_b == -INFINITY ? from_a : from_b;
  const int n = min(kVector, static_cast<int>(p.head_dim) - granule * kVector);
  for (int d = 0; d < n; ++d) {
    out[d] = one_side ? whole[d]
                      : static_cast<T>(w.weight_a * static_cast<float>(from_a[d]) +
                                       w.weight_b * static_cast<float>(from_b[d]));
  }
}

template <class T>
void launch(const MergeStatesParams& p, cudaStream_t stream) {
  // A row without elements still has an lse.
  const int granules_per_row =
      p.head_dim == 0 ? 1 : static_cast<int>(ceil_div<int64_t>(p.head_dim, kVector));
  const int64_t n_granules = p.batch * p.n_tokens * p.n_heads * granules_per_row;
  const int64_t n_blocks = ceil_div<int64_t>(n_granules, kThreads);
  merge_states_kernel<T>
      <<<static_cast<unsigned>(n_blocks), kThreads, 0, stream>>>(p, n_granules, granules_per_row);
  check_launch("merge_states");
}

}  // namespace

void run(const MergeStatesParams& p, void* stream) {
  if (p.dtype == DType::kBFloat16) return launch<__nv_bfloat16>(p, as_stream(stream));
  launch<__half>(p, as_stream(stream));
}

}  // namespace lighttransfer::cuda
