// Kernels that use what nvcc's code needs from a device: control flow, warps, spaces, calls.
#include <cassert>
#include <cstdint>
#include <cstdio>

extern "C" {

// Every thread loops a different number of times, with a data-dependent exit in the middle.
__global__ void collatz(const int* start, int* steps, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  long long x = start[i];
  int count = 0;
  while (x != 1) {
    if (x < 0) break;
    x = x % 2 ? 3 * x + 1 : x / 2;
    ++count;
  }
  steps[i] = count;
}

__global__ void dense_switch(const int* op, const int* x, int* y) {
  int i = threadIdx.x, v = x[i];
  switch (op[i]) {
    case 0:
      v = v * 3 + 1;
      break;
    case 1:
      v = v ^ 0x55;
      break;
    case 2:
      v = __popc(v);
      break;
    case 3:
      v = -v;
      break;
    case 4:
      v = v * v;
      break;
    case 5:
      v = v / 7;
      break;
    case 6:
      v = v % 11;
      break;
    default:
      v = 1234;
  }
  y[i] = v;
}

__global__ void warp_reduce(const float* x, float* sum, float* prefix, unsigned* ballot,
                            int* any_all) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32;
  float v = x[i], total = v, scan = v;
  for (int offset = 16; offset > 0; offset /= 2)
    total += __shfl_xor_sync(0xFFFFFFFF, total, offset);
  for (int offset = 1; offset < 32; offset *= 2) {
    float below = __shfl_up_sync(0xFFFFFFFF, scan, offset);
    if (lane >= offset) scan += below;
  }
  sum[i] = total;
  prefix[i] = scan;
  ballot[i] = __ballot_sync(0xFFFFFFFF, v > 0);
  any_all[i] = __any_sync(0xFFFFFFFF, v > 2) + 2 * __all_sync(0xFFFFFFFF, v > -2);
}

__global__ void warp_groups(const int* key, unsigned* match, int* sum, int* broadcast, int* down) {
  int i = threadIdx.x;
  match[i] = __match_any_sync(0xFFFFFFFF, key[i]);
  sum[i] = __reduce_add_sync(0xFFFFFFFF, key[i]);
  broadcast[i] = __shfl_sync(0xFFFFFFFF, key[i], i / 8, 8);  // lane i / 8 of each group of eight
  down[i] = __shfl_down_sync(0xFFFFFFFF, key[i], 2, 16);
}

// Half of the warp takes each side; both sides shuffle among themselves, then all meet.
__global__ void divergent_shuffle(const int* x, int* y) {
  int i = threadIdx.x, v = x[i];
  if (i % 2) {
    v += __shfl_xor_sync(0xAAAAAAAA, v, 2);
  } else {
    v -= __shfl_xor_sync(0x55555555, v, 4);
  }
  __syncwarp();
  y[i] = v + __shfl_sync(0xFFFFFFFF, v, 0);
}

__global__ void block_vote(const int* x, int* count, int* all, int* any) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  int n = __syncthreads_count(x[i] > 0), a = __syncthreads_and(x[i] > -3),
      o = __syncthreads_or(x[i] > 3);
  count[i] = n;
  all[i] = a != 0;
  any[i] = o != 0;
}

__global__ void histogram(const int* x, int* global_bins, int n) {
  __shared__ int bins[16];
  if (threadIdx.x < 16) bins[threadIdx.x] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    atomicAdd(&bins[x[i] & 15], 1);
  __syncthreads();
  if (threadIdx.x < 16) atomicAdd(&global_bins[threadIdx.x], bins[threadIdx.x]);
}

__global__ void atomics(const int* x, int* out, float* fout, unsigned long long* lout) {
  int v = x[threadIdx.x];
  atomicMin(&out[0], v);
  atomicMax(&out[1], v);
  atomicXor(&out[2], v);
  atomicOr(&out[3], v);
  atomicAnd(&out[4], v);
  atomicInc(reinterpret_cast<unsigned*>(&out[5]), 9);
  atomicExch(&out[6], 77);
  int old = out[7], assumed;
  do {
    assumed = old;
    old = atomicCAS(&out[7], assumed, assumed + v);
  } while (assumed != old);
  atomicAdd(fout, 0.5f * v);
  atomicAdd(lout, static_cast<unsigned long long>(v) << 33);
}

__constant__ float kTable[8] = {1, 2, 4, 8, 16, 32, 64, 128};
__device__ int g_counter = 5;
__device__ const int* g_pointer = nullptr;

__global__ void variables(float* out) {
  int i = threadIdx.x;
  out[i] = kTable[i % 8] + g_counter;
  if (i == 0 && g_pointer) out[i] = *g_pointer;
}

// An array that is indexed at run time: it lives in local memory, reached by generic addresses too.
__device__ __noinline__ int pick(const int* a, int i) {
  return a[i] + 1;
}
__global__ void local_arrays(const int* x, int* y) {
  int a[16];
  for (int k = 0; k < 16; ++k) a[k] = x[k] * (threadIdx.x + 1);
  int s = 0;
  for (int k = 0; k < 4; ++k) s += pick(a, (threadIdx.x + 5 * k) % 16);
  y[threadIdx.x] = s;
}

// One pointer to shared or to global memory, chosen at run time.
__global__ void generic_pointers(const int* x, int* y, int from_shared) {
  __shared__ int s[64];
  s[threadIdx.x] = x[threadIdx.x] * 2;
  __syncthreads();
  const int* p = threadIdx.x % 2 == from_shared ? s : x;
  asm volatile("" : "+l"(p));
  y[threadIdx.x] = p[63 - threadIdx.x];
}

struct Block {
  short a[3];
  double b;
  char c;
};
__global__ void struct_parameter(Block block, const __grid_constant__ Block by_address,
                                 double* out) {
  const Block* p = &by_address;
  out[0] = block.a[0] + block.a[2] * block.b + block.c;
  out[1] = p->a[threadIdx.x + 1] + p->b;
}

__global__ void say(int x, double d) {
  printf("thread %d says %.2f and %s%%\n", threadIdx.x + x, d, "text");
}

__global__ void asserts(int x) {
  assert(x <= 3);
}

__global__ void special_registers(int* out) {
  int i = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  int t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  unsigned lane, lt;
  asm("mov.u32 %0, %laneid; mov.u32 %1, %lanemask_lt;" : "=r"(lane), "=r"(lt));
  out[i * blockDim.x * blockDim.y * blockDim.z + t] = t * 1000 + lane * 10 + (__popc(lt) == lane);
}

// Named barriers: the first half produces, the second consumes.
__global__ void producer_consumer(const int* x, int* y) {
  __shared__ int s[64];
  int i = threadIdx.x;
  if (i < 64) {
    s[i] = x[i] + 1;
    asm volatile("bar.arrive 1, 128;" ::: "memory");
  } else {
    asm volatile("bar.sync 1, 128;" ::: "memory");
    y[i - 64] = s[i - 64] * 10;
  }
}

__global__ void async_copies(const float4* x, float4* y, int valid_bytes) {
  extern __shared__ float4 stage[];
  int i = threadIdx.x;
  unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(&stage[i]));
  unsigned to2 = static_cast<unsigned>(__cvta_generic_to_shared(&stage[blockDim.x + i]));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\ncp.async.commit_group;" ::"r"(to),
               "l"(x + i));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\ncp.async.commit_group;" ::"r"(to2),
               "l"(x + blockDim.x + i), "r"(i % 2 ? valid_bytes : 0));
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  __syncthreads();
  y[i] = stage[(i + 1) % blockDim.x];
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  y[blockDim.x + i] = stage[blockDim.x + (i + 1) % blockDim.x];
}

}  // extern "C"

// Launched by host code: stubs, launch configuration and errors.
template <class T>
__global__ void scale(T* x, T factor, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= factor;
}

extern "C" int host_scale(float* x, float factor, int n, int threads) {
  scale<<<(n + threads - 1) / threads, threads>>>(x, factor, n);
  return cudaGetLastError();
}

extern "C" int host_symbols(float* out, const float* table, int counter) {
  cudaMemcpyToSymbol(kTable, table, 8 * sizeof(float));
  cudaMemcpyToSymbol(g_counter, &counter, sizeof counter);
  int* device = nullptr;
  cudaMalloc(&device, sizeof(int));
  int value = 4321;
  cudaMemcpy(device, &value, sizeof value, cudaMemcpyHostToDevice);
  cudaMemcpyToSymbol(g_pointer, &device, sizeof device);
  variables<<<1, 32>>>(out);
  int status = cudaGetLastError(), back = 0;
  cudaMemcpyFromSymbol(&back, g_counter, sizeof back);
  device = nullptr;
  void* old = nullptr;
  cudaMemcpyFromSymbol(&old, g_pointer, sizeof old);
  cudaMemcpyToSymbol(g_pointer, &device, sizeof device);
  cudaFree(old);
  return status ? status : back - counter;
}
