// Access patterns whose bank conflicts and coalescing are known by arithmetic.
#include <cstdint>

extern "C" {

// Word stride between lanes: a stride of s conflicts gcd(s, 32) ways.
__global__ void shared_stride(float* out, int stride) {
  extern __shared__ float s[];
  s[threadIdx.x * stride] = static_cast<float>(threadIdx.x);
  __syncwarp();
  out[threadIdx.x] = s[threadIdx.x * stride];
}

__global__ void shared_broadcast(float* out) {
  __shared__ float s[32];
  s[threadIdx.x] = static_cast<float>(threadIdx.x);
  __syncwarp();
  out[threadIdx.x] = s[7];
}

__global__ void shared_wide(float4* out, int stride) {
  extern __shared__ float4 wide[];
  wide[threadIdx.x * stride] = make_float4(0, 1, 2, threadIdx.x);
  __syncwarp();
  out[threadIdx.x] = wide[threadIdx.x * stride];
}

// Eight rows of `row_bytes`: an ldmatrix is free of conflicts if the rows fall into different
// 16-byte columns of the banks.
__global__ void ldmatrix_rows(unsigned* out, int row_bytes, int swizzle) {
  extern __shared__ __align__(128) unsigned char rows[];
  for (int i = threadIdx.x; i < 32 * row_bytes / 4; i += 32)
    reinterpret_cast<unsigned*>(rows)[i] = i;
  __syncwarp();
  int row = threadIdx.x;
  int chunk = swizzle ? row & 7 : 0;
  unsigned address =
      static_cast<unsigned>(__cvta_generic_to_shared(rows + row * row_bytes + 16 * chunk));
  unsigned d[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address));
  out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}

__global__ void global_stride(const float* x, float* y, int stride) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = x[i * stride];
}

__global__ void global_wide(const float4* x, float4* y) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = x[i];
}

__global__ void global_same(const float* x, float* y) {
  y[threadIdx.x] = x[0];
}

}  // extern "C"
