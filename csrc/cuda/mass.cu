#include "kernels.h"
#include "launch.h"
#include "mass_kernel.cuh"

namespace lighttransfer::cuda {
namespace {

template <class T, int kHeadDim>
void launch_shape(const RetainedMassParams& p, cudaStream_t stream) {
  constexpr int kShared = MassShape<kHeadDim>::kSharedBytes;
  const auto kernel = retained_mass_kernel<T, kHeadDim>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
        "retained_mass");
  const int64_t n_tiles = ceil_div<int64_t>(p.n_queries * (p.n_heads / p.n_kv_heads), kMassRows);
  kernel<<<static_cast<unsigned>(p.batch * p.n_kv_heads * n_tiles), kMassThreads, kShared,
           stream>>>(p);
  check_launch("retained_mass");
}

// head_dim is rounded up; the loads fill the rest with zeros.
template <class T>
void launch(const RetainedMassParams& p, cudaStream_t stream) {
  if (p.head_dim <= 64) return launch_shape<T, 64>(p, stream);
  if (p.head_dim <= 96) return launch_shape<T, 96>(p, stream);
  if (p.head_dim <= 128) return launch_shape<T, 128>(p, stream);
  launch_shape<T, 256>(p, stream);
}

constexpr int kRatioThreads = 256;

// One CTA per row: the mean over its heads and real queries, summed in a fixed order.
__global__ void lazy_ratio_kernel(const LazyRatioParams p) {
  __shared__ float sums[kRatioThreads];
  const int64_t b = blockIdx.x;
  int64_t n = p.n_queries == nullptr ? p.n_last : p.n_queries[b];
  n = n < 0 ? 0 : (n > p.n_last ? p.n_last : n);
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < p.n_heads * n; i += kRatioThreads) {
    const int64_t head = i / n, query = p.n_last - n + i % n;
    const float2 mass =
        reinterpret_cast<const float2*>(p.mass)[(b * p.n_heads + head) * p.n_last + query];
    sum += mass.x + mass.y;
  }
  sums[threadIdx.x] = sum;
  for (int stride = kRatioThreads / 2; stride > 0; stride /= 2) {
    __syncthreads();
    if (threadIdx.x < stride) sums[threadIdx.x] += sums[threadIdx.x + stride];
  }
  if (threadIdx.x == 0) {
    const int64_t count = p.n_heads * n;
    p.ratio[b] = count == 0 ? 1.0f : sums[0] / static_cast<float>(count);
  }
}

}  // namespace

void run(const RetainedMassParams& p, void* stream) {
  if (p.dtype == DType::kBFloat16) return launch<__nv_bfloat16>(p, as_stream(stream));
  launch<__half>(p, as_stream(stream));
}

void run(const LazyRatioParams& p, void* stream) {
  lazy_ratio_kernel<<<static_cast<unsigned>(p.batch), kRatioThreads, 0, as_stream(stream)>>>(p);
  check_launch("lazy_ratio");
}

}  // namespace lighttransfer::cuda
