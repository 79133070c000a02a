// Moves of cached keys and values: one thread moves one vector of one token's head, K and V alike.
// fp16 and bf16 are the same 16-bit words to it.
#include <algorithm>

#include "kernels.h"
#include "launch.h"
#include "vector.h"

namespace lighttransfer::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kMaxTokens = 64;  // CUDA's limit of blockDim.z

// How a launch covers [rows, tokens, H_kv, vectors]: x, y and z of a thread are a vector, a head
// and one of the block's tokens, so its place costs one division, of 32 bits. Where a block has
// fewer threads than a token has heads, they come round for the others.
struct Blocks {
  unsigned per_row;
  dim3 grid, threads;

  Blocks(int64_t n_rows, int64_t n_tokens, int64_t n_heads, int64_t n_vectors) {
    const auto fill = [](int64_t n, unsigned room) { return n < room ? unsigned(n) : room; };
    threads.x = static_cast<unsigned>(n_vectors);
    threads.y = fill(n_heads, kThreads / threads.x);
    threads.z = fill(n_tokens, min(kThreads / (threads.x * threads.y), kMaxTokens));
    per_row = static_cast<unsigned>(ceil_div<int64_t>(n_tokens, threads.z));
    grid.x = static_cast<unsigned>(n_rows * per_row);
  }
};

// Positions and chunk lengths are int32, so the sums of two that count here fit 32 bits. Offsets do
// not.
struct Place {
  unsigned row, token;

  __device__ __forceinline__ explicit Place(unsigned blocks_per_row)
      : row(blockIdx.x / blocks_per_row),
        token((blockIdx.x - row * blocks_per_row) * blockDim.z + threadIdx.z) {}
};

struct Slot {
  int64_t page;
  uint32_t in_page;
};

// Whether the cache has the slot and the row's table maps it.
__device__ __forceinline__ bool find_slot(const KvCache& cache, unsigned row, uint32_t slot,
                                          Slot* found) {
  if (slot >= cache.capacity()) return false;
  if (cache.block_table == nullptr) {
    *found = {row, slot};
    return true;
  }
  // A page that 32 bits cannot count has every slot there is.
  const auto page_size =
      static_cast<uint32_t>(cache.page_size < UINT32_MAX ? cache.page_size : UINT32_MAX);
  const uint32_t index = slot / page_size;
  *found = {cache.block_table[row * cache.table_stride + index], slot - index * page_size};
  return found->page >= 0 && found->page < cache.n_pages;
}

template <class Vector>
__device__ __forceinline__ Vector* vector_at(void* data, int64_t head_of_token) {
  return reinterpret_cast<Vector*>(static_cast<uint16_t*>(data) + head_of_token) + threadIdx.x;
}

template <class Vector>
__device__ __forceinline__ Vector* activation_at(const Activation& a, const Place& at,
                                                 int64_t head) {
  return vector_at<Vector>(
      a.data, at.row * a.batch_stride + at.token * a.token_stride + head * a.head_stride);
}

template <class Vector>
__device__ __forceinline__ Vector* cache_at(const KvCache::Side& side, const Slot& slot,
                                            int64_t head) {
  return vector_at<Vector>(
      side.data,
      slot.page * side.page_stride + slot.in_page * side.slot_stride + head * side.head_stride);
}

template <class F>
__device__ __forceinline__ void for_each_head(int64_t n_heads, const F& f) {
  for (int64_t head = threadIdx.y; head < n_heads; head += blockDim.y) f(head);
}

// n_recent as a row has it, which no host may have checked: below 0 is a full row, as in Ring.
__device__ __forceinline__ RingOf<uint32_t> narrow(const Ring& ring) {
  return {static_cast<uint32_t>(ring.n_sink),
          static_cast<uint32_t>(ring.wraps() ? ring.n_recent : 0)};
}

template <class Vector>
__global__ void append_kernel(const AppendKvParams p, const unsigned blocks_per_row) {
  const Place at(blocks_per_row);
  if (at.token >= p.n_tokens) return;
  const int64_t length = p.seq_len[at.row], start = p.start(at.row);
  if (length < 0 || start < 0 || at.token < start) return;
  const KeptPositions written = p.written(at.row);
  const int64_t position = length + at.token - start;
  if (position >= written.sink_end && position < written.recent_begin) return;  // does not survive
  Slot to;
  const uint32_t slot = narrow(p.ring(at.row)).slot(static_cast<uint32_t>(position));
  if (!find_slot(p.cache, at.row, slot, &to)) return;
  for_each_head(p.n_kv_heads, [&](int64_t head) {
    *cache_at<Vector>(p.cache.k, to, head) = *activation_at<Vector>(p.k, at, head);
    *cache_at<Vector>(p.cache.v, to, head) = *activation_at<Vector>(p.v, at, head);
  });
}

// No row moves more tokens than its ring or its cache holds.
int64_t max_moves(const CompactKvParams& p) {
  return std::min(p.ring.n_recent, p.cache.capacity());
}

// All moves at once: Ring::move_begin says why they need neither an order nor a temporary.
template <class Vector>
__global__ void compact_kernel(const CompactKvParams p, const unsigned blocks_per_row) {
  const Place at(blocks_per_row);
  const int64_t row = p.row(at.row);
  if (row < 0 || row >= p.batch) return;
  const int64_t length = p.seq_len[row];
  const int64_t position = p.ring.move_begin(length) + at.token;
  if (position >= length) return;
  const uint32_t slot = static_cast<uint32_t>(position);  // of a full row
  Slot from, to;
  if (!find_slot(p.cache, row, slot, &from)) return;
  if (!find_slot(p.cache, row, narrow(p.ring).slot(slot), &to)) return;
  for_each_head(p.n_kv_heads, [&](int64_t head) {
    *cache_at<Vector>(p.cache.k, to, head) = *cache_at<Vector>(p.cache.k, from, head);
    *cache_at<Vector>(p.cache.v, to, head) = *cache_at<Vector>(p.cache.v, from, head);
  });
}

__device__ __forceinline__ KeptPositions cached_positions(const GatherKvParams& p, int64_t row) {
  return p.ring(row).kept(0, p.seq_len[row] < 0 ? 0 : p.seq_len[row]);
}

__global__ void gather_starts_kernel(const GatherKvParams p) {
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= p.batch) return;
  const int64_t start = p.max_len - cached_positions(p, row).size();
  p.seq_start[row] = static_cast<int32_t>(start > 0 ? start : 0);
}

template <class Vector>
__global__ void gather_kernel(const GatherKvParams p, const unsigned blocks_per_row) {
  const Place at(blocks_per_row);
  if (at.token >= p.max_len) return;
  const KeptPositions cached = cached_positions(p, at.row);
  const int64_t i = at.token - (p.max_len - cached.size());
  Slot from;
  bool exists = i >= 0;
  if (exists) {
    const uint32_t slot = narrow(p.ring(at.row)).slot(static_cast<uint32_t>(cached[i]));
    exists = find_slot(p.cache, at.row, slot, &from);
  }
  for_each_head(p.n_kv_heads, [&](int64_t head) {
    Vector *k = activation_at<Vector>(p.k, at, head), *v = activation_at<Vector>(p.v, at, head);
    *k = exists ? *cache_at<Vector>(p.cache.k, from, head) : Vector{};
    *v = exists ? *cache_at<Vector>(p.cache.v, from, head) : Vector{};
  });
}

template <class Vector, class Params>
Blocks blocks(const Params& p, int64_t n_rows, int64_t n_tokens) {
  return Blocks(n_rows, n_tokens, p.n_kv_heads, p.head_dim * 2 / int64_t(sizeof(Vector)));
}

}  // namespace

void run(const AppendKvParams& p, void* stream) {
  with_vector(rows_aligned(p.cache) && rows_aligned(p.k) && rows_aligned(p.v), [&](auto vector) {
    using V = decltype(vector);
    const Blocks b = blocks<V>(p, p.batch, p.n_tokens);
    append_kernel<V><<<b.grid, b.threads, 0, as_stream(stream)>>>(p, b.per_row);
  });
  check_launch("append_kv_");
}

void run(const CompactKvParams& p, void* stream) {
  if (max_moves(p) == 0) return;
  with_vector(rows_aligned(p.cache), [&](auto vector) {
    using V = decltype(vector);
    const Blocks b = blocks<V>(p, p.n_rows, max_moves(p));
    compact_kernel<V><<<b.grid, b.threads, 0, as_stream(stream)>>>(p, b.per_row);
  });
  check_launch("compact_kv_");
}

void run(const GatherKvParams& p, void* stream) {
  const auto n_blocks = static_cast<unsigned>(ceil_div<int64_t>(p.batch, kThreads));
  gather_starts_kernel<<<n_blocks, kThreads, 0, as_stream(stream)>>>(p);
  check_launch("gather_kv");
  if (p.max_len == 0 || p.n_kv_heads == 0) return;
  with_vector(rows_aligned(p.cache) && rows_aligned(p.k) && rows_aligned(p.v), [&](auto vector) {
    using V = decltype(vector);
    const Blocks b = blocks<V>(p, p.batch, p.max_len);
    gather_kernel<V><<<b.grid, b.threads, 0, as_stream(stream)>>>(p, b.per_row);
  });
  check_launch("gather_kv");
}

}  // namespace lighttransfer::cuda
