#include "../state.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels.h"
#include "launch.h"
#include "vector.h"

namespace lighttransfer::cuda {
namespace {

constexpr int kThreads = 256;

// One thread merges one vector of one row; the thread of a row's first vector also writes the row's
// lse.
template <class T, class Vector>
__global__ void merge_states_kernel(MergeStatesParams p, int64_t n_vectors, int vectors_per_row) {
  constexpr int kElements = sizeof(Vector) / sizeof(T);
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n_vectors) return;
  const int64_t row = i / vectors_per_row;
  const int vector = static_cast<int>(i % vectors_per_row);
  const int64_t h = row % p.n_heads, s = row / p.n_heads % p.n_tokens,
                b = row / p.n_heads / p.n_tokens;

  const float lse_a =
      p.lse_a[b * p.lse_a_strides[0] + h * p.lse_a_strides[1] + s * p.lse_a_strides[2]];
  const float lse_b =
      p.lse_b[b * p.lse_b_strides[0] + h * p.lse_b_strides[1] + s * p.lse_b_strides[2]];
  const MergeWeights w = merge_weights(lse_a, lse_b);
  if (vector == 0) {
    p.lse[b * p.lse_strides[0] + h * p.lse_strides[1] + s * p.lse_strides[2]] = w.lse;
  }
  if (p.head_dim == 0) return;

  const auto at = [&](const Activation& a) {
    T* row_begin =
        static_cast<T*>(a.data) + b * a.batch_stride + s * a.token_stride + h * a.head_stride;
    return reinterpret_cast<Vector*>(row_begin) + vector;
  };
  if (lse_a == -INFINITY || lse_b == -INFINITY) {
    *at(p.out) = *at(lse_b == -INFINITY ? p.out_a : p.out_b);  // bit for bit
    return;
  }
  const Vector from_a = *at(p.out_a), from_b = *at(p.out_b);
  const T* elements_a = reinterpret_cast<const T*>(&from_a);
  const T* elements_b = reinterpret_cast<const T*>(&from_b);
  Vector merged;
  T* elements = reinterpret_cast<T*>(&merged);
#pragma unroll
  for (int d = 0; d < kElements; ++d) {
    elements[d] = static_cast<T>(w.weight_a * static_cast<float>(elements_a[d]) +
                                 w.weight_b * static_cast<float>(elements_b[d]));
  }
  *at(p.out) = merged;
}

template <class T>
void launch(const MergeStatesParams& p, cudaStream_t stream) {
  const bool aligned = p.head_dim % kVectorElements == 0 && rows_aligned(p.out_a) &&
                       rows_aligned(p.out_b) && rows_aligned(p.out);
  with_vector(aligned, [&](auto vector) {
    using V = decltype(vector);
    // A row without elements still has an lse.
    const int64_t per_row = p.head_dim == 0 ? 1 : p.head_dim * int64_t(sizeof(T)) / sizeof(V);
    const int64_t n_vectors = p.batch * p.n_tokens * p.n_heads * per_row;
    merge_states_kernel<T, V>
        <<<static_cast<unsigned>(ceil_div<int64_t>(n_vectors, kThreads)), kThreads, 0, stream>>>(
            p, n_vectors, static_cast<int>(per_row));
  });
  check_launch("merge_states");
}

}  // namespace

void run(const MergeStatesParams& p, void* stream) {
  if (p.dtype == DType::kBFloat16) return launch<__nv_bfloat16>(p, as_stream(stream));
  launch<__half>(p, as_stream(stream));
}

}  // namespace lighttransfer::cuda
