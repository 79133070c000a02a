// Moves of cached tokens. Every move is a memcpy of the longest run that is consecutive in both
// places; runs are spread over the threads, and no two of them touch the same bytes.
#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "parallel.h"

namespace lighttransfer::cpu {
namespace {

constexpr int64_t kBytesPerTask = 64 * 1024;  // K and V together

// Tokens that lie at a constant distance from each other; strides in bytes.
struct Tokens {
  char* data;  // [n, H_kv, D]
  int64_t token_stride, head_stride;
};

// One call's moves: the shape of a token and the cache that holds it.
struct Mover {
  const KvCache& cache;
  int64_t n_heads, head_bytes, element_bytes;

  template <class Params>
  explicit Mover(const Params& p)
      : cache(p.cache),
        n_heads(p.n_kv_heads),
        head_bytes(p.head_dim * (p.dtype == DType::kFloat32 ? 4 : 2)),
        element_bytes(p.dtype == DType::kFloat32 ? 4 : 2) {}

  // Slots from `slot` on that share its page.
  int64_t left_in_page(int64_t slot) const { return cache.page_size - slot % cache.page_size; }

  Tokens in_cache(const KvCache::Side& side, int64_t b, int64_t slot) const {
    const int64_t offset =
        cache.page(b, slot) * side.page_stride + slot % cache.page_size * side.slot_stride;
    return {static_cast<char*>(side.data) + offset * element_bytes,
            side.slot_stride * element_bytes, side.head_stride * element_bytes};
  }

  Tokens in_activation(const Activation& a, int64_t b, int64_t token) const {
    const int64_t offset = b * a.batch_stride + token * a.token_stride;
    return {static_cast<char*>(a.data) + offset * element_bytes, a.token_stride * element_bytes,
            a.head_stride * element_bytes};
  }

  // Bytes of n tokens, one head after the other or one token after the other where that makes
  // longer copies.
  void copy(const Tokens& to, const Tokens& from, int64_t n) const {
    const int64_t token_bytes = n_heads * head_bytes;
    const auto heads_adjoin = [&](const Tokens& t) {
      return n_heads == 1 || t.head_stride == head_bytes;
    };
    const auto tokens_adjoin = [&](const Tokens& t, int64_t bytes) {
      return n == 1 || t.token_stride == bytes;
    };
    if (heads_adjoin(to) && heads_adjoin(from)) {
      if (tokens_adjoin(to, token_bytes) && tokens_adjoin(from, token_bytes)) {
        std::memcpy(to.data, from.data, n * token_bytes);
        return;
      }
      for (int64_t i = 0; i < n; ++i) {
        std::memcpy(to.data + i * to.token_stride, from.data + i * from.token_stride, token_bytes);
      }
      return;
    }
    for (int64_t h = 0; h < n_heads; ++h) {
      char* head_to = to.data + h * to.head_stride;
      const char* head_from = from.data + h * from.head_stride;
      if (tokens_adjoin(to, head_bytes) && tokens_adjoin(from, head_bytes)) {
        std::memcpy(head_to, head_from, n * head_bytes);
        continue;
      }
      for (int64_t i = 0; i < n; ++i) {
        std::memcpy(head_to + i * to.token_stride, head_from + i * from.token_stride, head_bytes);
      }
    }
  }

  // body(row, begin, end) over tasks that cover [0, n_tokens) of every row.
  template <class Body>
  void for_each_task(int64_t n_rows, int64_t n_tokens, const Body& body) const {
    if (n_tokens == 0) return;
    const int64_t token_bytes = 2 * n_heads * head_bytes;
    const int64_t per_task = std::clamp<int64_t>(kBytesPerTask / token_bytes, 1, n_tokens);
    const int64_t n_tasks = (n_tokens + per_task - 1) / per_task;
    const int64_t grain = std::max<int64_t>(kBytesPerTask / (per_task * token_bytes), 1);
    parallel_for(0, n_rows * n_tasks, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t first = i % n_tasks * per_task;
        body(i / n_tasks, first, std::min(first + per_task, n_tokens));
      }
    });
  }
};

// The longest row's count.
template <class Count>
int64_t max_over_rows(int64_t n_rows, const Count& count) {
  int64_t most = 0;
  for (int64_t i = 0; i < n_rows; ++i) most = std::max(most, count(i));
  return most;
}

}  // namespace

void run(const CompactKvParams& p) {
  const Mover mover(p);
  const auto n_moves = [&](int64_t i) {
    const int64_t length = std::max(p.seq_len[p.row(i)], 0);
    return length - p.ring.move_begin(length);
  };
  mover.for_each_task(
      p.n_rows, max_over_rows(p.n_rows, n_moves), [&](int64_t i, int64_t begin, int64_t end) {
        const int64_t b = p.row(i);
        const int64_t first = p.ring.move_begin(std::max(p.seq_len[b], 0));
        end = std::min(end, n_moves(i));
        for (int64_t move = begin; move < end;) {
          const int64_t from = first + move, to = p.ring.slot(from);  // a full row: slot = position
          const int64_t n = std::min(
              {end - move, p.ring.run(from), mover.left_in_page(from), mover.left_in_page(to)});
          for (const KvCache::Side* side : {&p.cache.k, &p.cache.v}) {
            mover.copy(mover.in_cache(*side, b, to), mover.in_cache(*side, b, from), n);
          }
          move += n;
        }
      });
}

void run(const AppendKvParams& p) {
  const Mover mover(p);
  mover.for_each_task(p.batch, p.n_tokens, [&](int64_t b, int64_t begin, int64_t end) {
    if (p.seq_len[b] < 0) return;
    const Ring ring = p.ring(b);
    const KeptPositions written = p.written(b);
    end = std::min(end, written.size());
    for (int64_t i = begin; i < end;) {
      const int64_t t = written[i], slot = ring.slot(t);
      const int64_t token = p.start(b) + (t - p.seq_len[b]);
      const int64_t n = std::min({end - i, written.run(i), ring.run(t), mover.left_in_page(slot)});
      mover.copy(mover.in_cache(p.cache.k, b, slot), mover.in_activation(p.k, b, token), n);
      mover.copy(mover.in_cache(p.cache.v, b, slot), mover.in_activation(p.v, b, token), n);
      i += n;
    }
  });
}

void run(const GatherKvParams& p) {
  const Mover mover(p);
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t length = std::max(p.seq_len[b], 0);
    p.seq_start[b] =
        static_cast<int32_t>(p.max_len - (length == 0 ? 0 : p.ring(b).n_slots(length)));
  }
  if (p.n_kv_heads == 0) return;
  mover.for_each_task(p.batch, p.max_len, [&](int64_t b, int64_t begin, int64_t end) {
    const int64_t front = p.seq_start[b];
    for (int64_t token = begin; token < std::min(end, front); ++token) {
      for (const Activation* a : {&p.k, &p.v}) {
        // Outputs are contiguous, so a token is one piece.
        std::memset(mover.in_activation(*a, b, token).data, 0, mover.n_heads * mover.head_bytes);
      }
    }
    if (end <= front) return;
    const Ring ring = p.ring(b);
    const KeptPositions cached = ring.kept(0, p.seq_len[b]);
    for (int64_t token = std::max(begin, front); token < end;) {
      const int64_t i = token - front, t = cached[i], slot = ring.slot(t);
      const int64_t n =
          std::min({end - token, cached.run(i), ring.run(t), mover.left_in_page(slot)});
      mover.copy(mover.in_activation(p.k, b, token), mover.in_cache(p.cache.k, b, slot), n);
      mover.copy(mover.in_activation(p.v, b, token), mover.in_cache(p.cache.v, b, slot), n);
      token += n;
    }
  });
}

}  // namespace lighttransfer::cpu
