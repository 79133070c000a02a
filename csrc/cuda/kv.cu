// Moves of cached keys and values: one thread moves one vector of one token's head, K and V alike.
#include "kernels.h"
#include "launch.h"
#include "vector.h"

namespace lighttransfer::cuda {
namespace {

constexpr int kThreads = 256;

// A thread's place in a [rows, tokens, H_kv, vectors] grid, vectors fastest.
struct Place {
  int64_t row, token;
  int64_t head;
  int64_t element;  // within the head
};

__device__ __forceinline__ bool find_place(int64_t n_rows, int64_t n_tokens, int64_t n_heads,
                                           int64_t head_dim, int vector, Place* place) {
  const int64_t n_vectors = head_dim / vector;
  int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= n_rows * n_tokens * n_heads * n_vectors) return false;
  place->element = i % n_vectors * vector;
  i /= n_vectors;
  place->head = i % n_heads;
  i /= n_heads;
  place->token = i % n_tokens;
  place->row = i / n_tokens;
  return true;
}

template <class T>
__device__ __forceinline__ T* activation_at(const Activation& a, int64_t token, const Place& at) {
  return static_cast<T*>(a.data) + at.row * a.batch_stride + token * a.token_stride +
         at.head * a.head_stride + at.element;
}

// nullptr where the row's table does not map the slot.
template <class T>
__device__ __forceinline__ T* cache_at(const KvCache& cache, const KvCache::Side& side, int64_t row,
                                       int64_t slot, const Place& at) {
  if (slot < 0 || slot >= cache.capacity()) return nullptr;
  const int64_t page = cache.page(row, slot);
  if (page < 0 || page >= cache.n_pages) return nullptr;
  return static_cast<T*>(side.data) + page * side.page_stride +
         slot % cache.page_size * side.slot_stride + at.head * side.head_stride + at.element;
}

template <class Vector>
__device__ __forceinline__ void move(const void* from, void* to) {
  *static_cast<Vector*>(to) = *static_cast<const Vector*>(from);
}

template <class Vector, class T>
__global__ void append_kernel(AppendKvParams p) {
  Place at;
  if (!find_place(p.batch, p.n_tokens, p.n_kv_heads, p.head_dim, sizeof(Vector) / sizeof(T), &at)) {
    return;
  }
  const int64_t length = p.seq_len[at.row], start = p.start(at.row);
  if (length < 0 || start < 0 || at.token < start) return;
  const Ring ring = p.ring(at.row);
  const KeptPositions written = p.written(at.row);
  const int64_t position = length + at.token - start;
  if (position >= written.sink_end && position < written.recent_begin) return;  // does not survive
  const int64_t slot = ring.slot(position);
  T* k = cache_at<T>(p.cache, p.cache.k, at.row, slot, at);
  if (k == nullptr) return;
  move<Vector>(activation_at<T>(p.k, at.token, at), k);
  move<Vector>(activation_at<T>(p.v, at.token, at),
               cache_at<T>(p.cache, p.cache.v, at.row, slot, at));
}

// No row moves more tokens than its ring or its cache holds.
__host__ __device__ __forceinline__ int64_t max_moves(const CompactKvParams& p) {
  const int64_t capacity = p.cache.capacity();
  return p.ring.n_recent < capacity ? p.ring.n_recent : capacity;
}

// All moves at once: Ring::move_begin says why they need neither an order nor a temporary.
template <class Vector, class T>
__global__ void compact_kernel(CompactKvParams p) {
  Place at;
  if (!find_place(p.n_rows, max_moves(p), p.n_kv_heads, p.head_dim, sizeof(Vector) / sizeof(T),
                  &at)) {
    return;
  }
  const int64_t row = p.row(at.row);
  if (row < 0 || row >= p.batch) return;
  const int64_t length = p.seq_len[row] < 0 ? 0 : p.seq_len[row];
  const int64_t position = p.ring.move_begin(length) + at.token;
  if (position >= length) return;
  const auto side = [&](const KvCache::Side& s) {
    const T* from = cache_at<T>(p.cache, s, row, position, at);
    T* to = cache_at<T>(p.cache, s, row, p.ring.slot(position), at);
    if (from != nullptr && to != nullptr) move<Vector>(from, to);
  };
  side(p.cache.k);
  side(p.cache.v);
}

__device__ __forceinline__ KeptPositions cached_positions(const GatherKvParams& p, int64_t row) {
  return p.ring(row).kept(0, p.seq_len[row] < 0 ? 0 : p.seq_len[row]);
}

__global__ void gather_starts_kernel(GatherKvParams p) {
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= p.batch) return;
  const int64_t start = p.max_len - cached_positions(p, row).size();
  p.seq_start[row] = static_cast<int32_t>(start > 0 ? start : 0);
}

template <class Vector, class T>
__global__ void gather_kernel(GatherKvParams p) {
  Place at;
  if (!find_place(p.batch, p.max_len, p.n_kv_heads, p.head_dim, sizeof(Vector) / sizeof(T), &at)) {
    return;
  }
  const Ring ring = p.ring(at.row);
  const KeptPositions cached = cached_positions(p, at.row);
  const int64_t start = p.max_len - cached.size();
  const int64_t i = at.token - start;
  const auto side = [&](const KvCache::Side& s, const Activation& out) {
    const T* from = i < 0 ? nullptr : cache_at<T>(p.cache, s, at.row, ring.slot(cached[i]), at);
    T* to = activation_at<T>(out, at.token, at);
    if (from != nullptr) {
      move<Vector>(from, to);
    } else {
      *reinterpret_cast<Vector*>(to) = Vector{};
    }
  };
  side(p.cache.k, p.k);
  side(p.cache.v, p.v);
}

unsigned n_blocks(int64_t n_vectors) {
  return static_cast<unsigned>(ceil_div<int64_t>(n_vectors, kThreads));
}

}  // namespace

// fp16 and bf16 move alike: as 16-bit words.
void run(const AppendKvParams& p, void* stream) {
  with_vector(rows_aligned(p.cache) && rows_aligned(p.k) && rows_aligned(p.v), [&](auto vector) {
    using V = decltype(vector);
    const int64_t n = p.batch * p.n_tokens * p.n_kv_heads * p.head_dim * 2 / int64_t(sizeof(V));
    append_kernel<V, uint16_t><<<n_blocks(n), kThreads, 0, as_stream(stream)>>>(p);
  });
  check_launch("append_kv_");
}

void run(const CompactKvParams& p, void* stream) {
  with_vector(rows_aligned(p.cache), [&](auto vector) {
    using V = decltype(vector);
    const int64_t n = p.n_rows * max_moves(p) * p.n_kv_heads * p.head_dim * 2 / int64_t(sizeof(V));
    compact_kernel<V, uint16_t><<<n_blocks(n), kThreads, 0, as_stream(stream)>>>(p);
  });
  check_launch("compact_kv_");
}

void run(const GatherKvParams& p, void* stream) {
  gather_starts_kernel<<<n_blocks(p.batch), kThreads, 0, as_stream(stream)>>>(p);
  check_launch("gather_kv");
  if (p.max_len == 0 || p.n_kv_heads == 0) return;
  with_vector(rows_aligned(p.cache) && rows_aligned(p.k) && rows_aligned(p.v), [&](auto vector) {
    using V = decltype(vector);
    const int64_t n = p.batch * p.max_len * p.n_kv_heads * p.head_dim * 2 / int64_t(sizeof(V));
    gather_kernel<V, uint16_t><<<n_blocks(n), kThreads, 0, as_stream(stream)>>>(p);
  });
  check_launch("gather_kv");
}

}  // namespace lighttransfer::cuda
