// Each fault beside its clean twin: template argument true is the bug. The kernels are named
// NAME_bug and NAME_clean.
#include <cstdint>

#define TWINS(name, params, args)                  \
  extern "C" __global__ void name##_bug params {   \
    name<true> args;                               \
  }                                                \
  extern "C" __global__ void name##_clean params { \
    name<false> args;                              \
  }

#define DEVICE         \
  template <bool kBug> \
  static __device__ __forceinline__ void

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from)
               : "memory");
}
__device__ __forceinline__ void commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- races
// -----------------------------------------------------------------------------------------------------------

// Warp 0 runs first in the simulator's default order, so the values are right even without the
// barrier.
DEVICE missing_syncthreads(const int* x, int* y) {
  __shared__ int s[128];
  s[threadIdx.x] = x[threadIdx.x];
  if (!kBug) __syncthreads();
  y[threadIdx.x] = s[threadIdx.x & ~32];
}
TWINS(missing_syncthreads, (const int* x, int* y), (x, y))

// The second barrier keeps a fast warp from overwriting what a slow one still reads.
DEVICE write_after_read(const int* x, int* y) {
  __shared__ int s[64];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  int v = s[63 - threadIdx.x];
  if (!kBug) __syncthreads();
  s[threadIdx.x] = v + 1;
  __syncthreads();
  y[threadIdx.x] = s[63 - threadIdx.x];
}
TWINS(write_after_read, (const int* x, int* y), (x, y))

DEVICE write_after_write(const int* x, int* y) {
  __shared__ int s[32];
  if (threadIdx.x < 32) s[threadIdx.x] = x[threadIdx.x];
  if (!kBug) __syncthreads();
  if (threadIdx.x >= 32) s[threadIdx.x % 32] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x % 32];
}
TWINS(write_after_write, (const int* x, int* y), (x, y))

DEVICE two_lanes_one_word(const int* x, int* y) {
  __shared__ int s[32];
  s[kBug ? threadIdx.x / 2 : threadIdx.x] = x[threadIdx.x];
  __syncwarp();
  y[threadIdx.x] = s[threadIdx.x / 2];
}
TWINS(two_lanes_one_word, (const int* x, int* y), (x, y))

DEVICE missing_syncwarp(const int* x, int* y) {
  __shared__ int s[32];
  s[threadIdx.x] = x[threadIdx.x];
  if (!kBug) __syncwarp();
  y[threadIdx.x] = s[threadIdx.x ^ 1];
}
TWINS(missing_syncwarp, (const int* x, int* y), (x, y))

// Halves of a warp that synchronise among themselves only.
DEVICE partial_syncwarp(const int* x, int* y) {
  __shared__ int s[32];
  unsigned half = threadIdx.x < 16 ? 0x0000FFFFu : 0xFFFF0000u;
  s[threadIdx.x] = x[threadIdx.x];
  __syncwarp(half);
  y[threadIdx.x] = s[threadIdx.x ^ (kBug ? 16 : 1)];
}
TWINS(partial_syncwarp, (const int* x, int* y), (x, y))

DEVICE missing_syncwarp_ldmatrix(const uint4* x, unsigned* y) {
  __shared__ __align__(16) uint4 s[8];
  if (threadIdx.x < 8) s[threadIdx.x] = x[threadIdx.x];
  if (!kBug) __syncwarp();
  unsigned d;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
               : "=r"(d)
               : "r"(shared_address(&s[threadIdx.x % 8])));
  y[threadIdx.x] = d;
}
TWINS(missing_syncwarp_ldmatrix, (const uint4* x, unsigned* y), (x, y))

// Bytes of one word written by different threads do not race.
extern "C" __global__ void neighbouring_bytes_clean(const unsigned char* x, unsigned char* y) {
  __shared__ unsigned char s[64];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s[63 - threadIdx.x];
}

// Bytes, then the words that they make, then bytes again.
DEVICE racing_bytes(const unsigned char* x, unsigned char* y) {
  __shared__ __align__(16) unsigned char s[64];
  s[threadIdx.x] = x[threadIdx.x];
  if (!kBug) __syncthreads();
  unsigned word = reinterpret_cast<volatile unsigned*>(s)[threadIdx.x / 4];
  __syncthreads();
  if (threadIdx.x % 4 == 0) reinterpret_cast<unsigned*>(s)[threadIdx.x / 4] = word + 0x01010101u;
  __syncthreads();
  y[threadIdx.x] = s[threadIdx.x];
}
TWINS(racing_bytes, (const unsigned char* x, unsigned char* y), (x, y))

// ---- cp.async
// --------------------------------------------------------------------------------------------------------

DEVICE missing_wait(const uint4* x, uint4* y) {
  __shared__ __align__(16) uint4 s[64];
  copy16(&s[threadIdx.x], x + threadIdx.x);
  commit();
  if (!kBug) wait<0>();
  __syncthreads();
  y[threadIdx.x] = s[63 - threadIdx.x];
  if (kBug) wait<0>();
}
TWINS(missing_wait, (const uint4* x, uint4* y), (x, y))

DEVICE wait_allows_one_group_too_many(const uint4* x, uint4* y) {
  __shared__ __align__(16) uint4 s[128];
  for (int k = 0; k < 2; ++k) {
    copy16(&s[64 * k + threadIdx.x], x + 64 * k + threadIdx.x);
    commit();
  }
  wait<kBug ? 2 : 1>();
  __syncthreads();
  y[threadIdx.x] = s[63 - threadIdx.x];
  wait<0>();
  __syncthreads();
  y[64 + threadIdx.x] = s[127 - threadIdx.x];
}
TWINS(wait_allows_one_group_too_many, (const uint4* x, uint4* y), (x, y))

// An uncommitted copy belongs to no group: the wait does not cover it.
DEVICE missing_commit(const uint4* x, uint4* y) {
  __shared__ __align__(16) uint4 s[64];
  copy16(&s[threadIdx.x], x + threadIdx.x);
  if (!kBug) commit();
  wait<0>();
  __syncthreads();
  y[threadIdx.x] = s[63 - threadIdx.x];
  if (kBug) asm volatile("cp.async.wait_all;" ::: "memory");
}
TWINS(missing_commit, (const uint4* x, uint4* y), (x, y))

// Waiting makes a copy visible to its own thread only.
DEVICE barrier_before_wait(const uint4* x, uint4* y) {
  __shared__ __align__(16) uint4 s[64];
  copy16(&s[threadIdx.x], x + threadIdx.x);
  commit();
  if (kBug) {
    __syncthreads();
    wait<0>();
  } else {
    wait<0>();
    __syncthreads();
  }
  y[threadIdx.x] = s[63 - threadIdx.x];
}
TWINS(barrier_before_wait, (const uint4* x, uint4* y), (x, y))

DEVICE copy_over_data_in_use(const uint4* x, uint4* y) {
  __shared__ __align__(16) uint4 s[64];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s[63 - threadIdx.x];
  if (!kBug) __syncthreads();
  copy16(&s[threadIdx.x], x + 64 + threadIdx.x);
  commit();
  wait<0>();
  __syncthreads();
  y[64 + threadIdx.x] = s[63 - threadIdx.x];
}
TWINS(copy_over_data_in_use, (const uint4* x, uint4* y), (x, y))

DEVICE in_flight_at_exit(const uint4* x, uint4* y) {
  __shared__ __align__(16) uint4 s[64];
  copy16(&s[threadIdx.x], x + threadIdx.x);
  commit();
  if (!kBug) wait<0>();
  y[threadIdx.x] = x[threadIdx.x];
}
TWINS(in_flight_at_exit, (const uint4* x, uint4* y), (x, y))

// ---- addresses
// -------------------------------------------------------------------------------------------------------

DEVICE shared_bounds(const int* x, int* y) {
  extern __shared__ int d[];
  d[threadIdx.x + (kBug ? 1 : 0)] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = d[threadIdx.x ? threadIdx.x : 1];
}
TWINS(shared_bounds, (const int* x, int* y), (x, y))

DEVICE global_bounds(const int* x, int* y) {
  y[threadIdx.x] = x[threadIdx.x + (kBug ? 1 : 0)];
}
TWINS(global_bounds, (const int* x, int* y), (x, y))

DEVICE global_bounds_store(const int* x, int* y) {
  y[static_cast<int>(threadIdx.x) - (kBug ? 1 : 0)] = x[threadIdx.x];
}
TWINS(global_bounds_store, (const int* x, int* y), (x, y))

DEVICE misaligned(const char* x, float4* y) {
  y[threadIdx.x] = *reinterpret_cast<const float4*>(x + 16 * threadIdx.x + (kBug ? 4 : 0));
}
TWINS(misaligned, (const char* x, float4* y), (x, y))

DEVICE uninitialized(const int* x, int* y) {
  __shared__ int s[64];
  if (threadIdx.x < (kBug ? 63 : 64)) s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s[63 - threadIdx.x];
}
TWINS(uninitialized, (const int* x, int* y), (x, y))

extern "C" __global__ void read_only(const int* x, int* y) {
  y[threadIdx.x] = x[threadIdx.x];
}

// A shared address used as a global one.
DEVICE wrong_space(const int* x, int* y) {
  __shared__ int s[32];
  s[threadIdx.x] = x[threadIdx.x];
  int v;
  if (kBug) {
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(&s[threadIdx.x]));
  } else {
    v = *static_cast<volatile int*>(&s[threadIdx.x]);
  }
  y[threadIdx.x] = v;
}
TWINS(wrong_space, (const int* x, int* y), (x, y))

// ---- barriers and lanes
// ----------------------------------------------------------------------------------------------

DEVICE divergent_barrier(const int* x, int* y) {
  if (!kBug || threadIdx.x % 32 < 16) {
    asm volatile("bar.sync 0;" ::: "memory");
  } else {
    y[threadIdx.x] = 1;
    asm volatile("bar.sync 0;" ::: "memory");
  }
  y[threadIdx.x] = x[threadIdx.x];
}
TWINS(divergent_barrier, (const int* x, int* y), (x, y))

DEVICE deadlock(const int* x, int* y) {
  if (!kBug || threadIdx.x < 32) {
    asm volatile("bar.sync 1, 64;" ::: "memory");
  }
  y[threadIdx.x] = x[threadIdx.x];
}
TWINS(deadlock, (const int* x, int* y), (x, y))

DEVICE mismatched_count(const int* x, int* y) {
  if (threadIdx.x < 32) {
    asm volatile("bar.sync 1, 64;" ::: "memory");
  } else {
    asm volatile("bar.sync 1, %0;" ::"n"(kBug ? 96 : 64) : "memory");
  }
  y[threadIdx.x] = x[threadIdx.x];
}
TWINS(mismatched_count, (const int* x, int* y), (x, y))

DEVICE overrun(const int* x, int* y) {
  if (threadIdx.x < 32) {
    asm volatile("bar.arrive 1, 64;" ::: "memory");
    if (kBug) asm volatile("bar.arrive 1, 64;" ::: "memory");
  } else {
    asm volatile("bar.sync 1, 64;" ::: "memory");
  }
  y[threadIdx.x] = x[threadIdx.x];
}
TWINS(overrun, (const int* x, int* y), (x, y))

DEVICE inactive_shuffle(const int* x, int* y) {
  int v = x[threadIdx.x];
  if (threadIdx.x < 16) v = __shfl_xor_sync(0x0000FFFF, v, kBug ? 16 : 8);
  y[threadIdx.x] = v;
}
TWINS(inactive_shuffle, (const int* x, int* y), (x, y))

// Lane 0 leaves; the others wait for it in a full-mask shuffle only in the bug.
DEVICE lanes_never_come(const int* x, int* y) {
  int v = x[threadIdx.x];
  if (kBug && threadIdx.x == 3) {
    while (atomicAdd(y, 0) == 0) {
      asm volatile("bar.warp.sync 0x8;" ::: "memory");
      if (atomicAdd(y + 1, 1) > 5) asm volatile("bar.warp.sync 0xFFFFFFFF;" ::: "memory");
    }
  } else {
    v += __shfl_down_sync(0xFFFFFFFF, v, 1);
  }
  y[threadIdx.x + 2] = v;
}
TWINS(lanes_never_come, (const int* x, int* y), (x, y))

DEVICE endless(const int* x, int* y) {
  volatile int* flag = y;
  if (kBug) {
    while (*flag == 0) {
    }
  }
  y[threadIdx.x] = x[threadIdx.x];
}
TWINS(endless, (const int* x, int* y), (x, y))

extern "C" __global__ void __launch_bounds__(128) bounded(const int* x, int* y) {
  y[threadIdx.x] = x[threadIdx.x];
}

extern "C" __global__ void traps(const int* x, int* y) {
  if (x[threadIdx.x] == 12345) asm volatile("trap;");
  y[threadIdx.x] = x[threadIdx.x];
}
