#include "../state.h"
#include "decode_split.h"
#include "decode_tile.h"
#include "kernels.h"
#include "parallel.h"

namespace lighttransfer::cpu::LIGHTTRANSFER_ISA {
namespace {

// A state in the workspace: `width` accumulators, then these.
Statistics& statistics(float* state, int64_t width) {
  return *reinterpret_cast<Statistics*>(state + width);
}
const Statistics& statistics(const float* state, int64_t width) {
  return *reinterpret_cast<const Statistics*>(state + width);
}

// One (row, split, KV head).
template <class E>
class SplitKernel {
 public:
  using T = typename E::Storage;

  SplitKernel(const StreamingDecodeParams& p, const DecodeSplits& splits)
      : p_(p), splits_(splits) {}

  void operator()(int64_t b, int64_t split, int64_t kv_head) {
    const Ring ring = p_.ring(b);
    const int64_t length = int64_t{p_.seq_len[b]} + 1, n_slots = ring.n_slots(length);
    const int64_t begin = (split - splits_.first_split()[b]) * kSplitSlots;
    const int64_t end = n_slots < begin + kSplitSlots ? n_slots : begin + kSplitSlots;
    if (p_.mass != nullptr) ranges_ = mass_ranges(ring, p_.window, length);
    const int64_t new_slot = ring.slot(length - 1);
    if (begin <= new_slot && new_slot < end) write_token(b, new_slot, kv_head);

    const int64_t group = p_.n_heads / p_.n_kv_heads;
    for (int64_t g = 0; g < group; ++g) clear(splits_.state(split, kv_head * group + g));
    for (int64_t tile = begin; tile < end; tile += kTile) {
      find_rows(p_.cache, b, kv_head, tile, tile + kTile < end ? tile + kTile : end, rows_);
      for (int64_t g = 0; g < group; g += kHeads) {
        const int64_t left = group - g, h = kv_head * group + g;
        heads(std::integral_constant<int, kHeads>{}, left < kHeads ? left : kHeads, b, split, h);
      }
    }
    for (int64_t g = 0; g < group; ++g) finish(splits_.state(split, kv_head * group + g));
  }

 private:
  void write_token(int64_t b, int64_t slot, int64_t h) const {
    const auto copy = [&](const KvCache::Side& side, const Activation& from) {
      const int64_t page = p_.cache.page(b, slot), offset = slot % p_.cache.page_size;
      T* to = static_cast<T*>(side.data) + page * side.page_stride + offset * side.slot_stride +
              h * side.head_stride;
      const T* row =
          static_cast<const T*>(from.data) + b * from.batch_stride + h * from.head_stride;
      std::memmove(to, row, p_.head_dim * sizeof(T));
    };
    copy(p_.cache.k, p_.k);
    copy(p_.cache.v, p_.v);
  }

  void clear(float* state) const {
    std::memset(state, 0, splits_.padded_head_dim() * sizeof(float));
    statistics(state, splits_.padded_head_dim()) = {-INFINITY, 0.0f, {0.0f, 0.0f}, -INFINITY};
  }

  void finish(float* state) const {
    Statistics& s = statistics(state, splits_.padded_head_dim());
    const float inverse = s.sum == 0.0f ? 0.0f : 1.0f / s.sum;
    for (int64_t d = 0; d < splits_.padded_head_dim(); ++d) state[d] *= inverse;
    for (float& mass : s.mass) mass *= inverse;
    s.lse = s.max + logf(s.sum);
  }

  // The tile's pass for `n` <= max_heads query heads from h on, with n known to the compiler.
  template <int n_heads>
  void heads(std::integral_constant<int, n_heads>, int64_t n, int64_t b, int64_t split, int64_t h) {
    if constexpr (n_heads > 1) {
      if (n < n_heads) return heads(std::integral_constant<int, n_heads - 1>{}, n, b, split, h);
    }
    const T* q[n_heads];
    float *acc[n_heads], correction[n_heads];
    alignas(64) float scores[n_heads][kTile];
    for (int i = 0; i < n_heads; ++i) {
      q[i] = static_cast<const T*>(p_.q.data) + b * p_.q.batch_stride + (h + i) * p_.q.head_stride;
      acc[i] = splits_.state(split, h + i);
    }
    score_tile<E, n_heads>(q, rows_, p_.head_dim, scores);
    for (int i = 0; i < n_heads; ++i) {
      Statistics& s = statistics(acc[i], splits_.padded_head_dim());
      correction[i] = softmax_tile(scores[i], rows_.n, p_.scale, s);
      if (p_.mass == nullptr) continue;
      s.mass[0] += range_sum(scores[i], ranges_.sinks, rows_.begin, rows_.n);
      for (SlotRange range : ranges_.recent) {
        s.mass[1] += range_sum(scores[i], range, rows_.begin, rows_.n);
      }
    }
    accumulate_tile<E, n_heads>(rows_, scores, correction, p_.head_dim, acc);
  }

  const StreamingDecodeParams& p_;
  const DecodeSplits& splits_;
  MassRanges ranges_{};
  TileRows<T> rows_;
};

// a becomes the state of both splits' keys.
void merge_into(float* a, const float* b, int64_t width) {
  using F = Element<DType::kFloat32>;
  Statistics& to = statistics(a, width);
  const Statistics& from = statistics(b, width);
  const MergeWeights w = merge_weights(to.lse, from.lse);
  if (from.lse == -INFINITY) return;
  if (to.lse == -INFINITY) {
    std::memcpy(a, b, width * sizeof(float));
    to = from;
    return;
  }
  const Vec weight_a = broadcast(w.weight_a), weight_b = broadcast(w.weight_b);
  for (int64_t d = 0; d < width; d += kLanes) {
    store<F>(a + d, fma(weight_a, load<F>(a + d), weight_b * load<F>(b + d)));
  }
  for (int i = 0; i < 2; ++i) {
    to.mass[i] = w.weight_a * to.mass[i] + w.weight_b * from.mass[i];
  }
  to.lse = w.lse;
}

// The outputs of one query head of one row, from its splits: merged as a binary tree, so that
// rounding grows with the logarithm of their number.
template <class E>
void write_outputs(const StreamingDecodeParams& p, const DecodeSplits& splits, int64_t b,
                   int64_t h) {
  using T = typename E::Storage;
  using F = Element<DType::kFloat32>;
  T* out = static_cast<T*>(p.out.data) + b * p.out.batch_stride + h * p.out.head_stride;
  const int64_t i = b * p.n_heads + h, width = splits.padded_head_dim();
  const int64_t first = splits.first_split()[b], n = splits.first_split()[b + 1] - first;
  if (n == 0) {
    std::memset(out, 0, p.head_dim * sizeof(T));
    p.lse[i] = -INFINITY;
    if (p.mass != nullptr) p.mass[2 * i] = p.mass[2 * i + 1] = 0.0f;
    return;
  }
  for (int64_t step = 1; step < n; step *= 2) {
    for (int64_t s = 0; s + step < n; s += 2 * step) {
      merge_into(splits.state(first + s, h), splits.state(first + s + step, h), width);
    }
  }
  const float* state = splits.state(first, h);
  int64_t d = 0;
  for (; d + kLanes <= p.head_dim; d += kLanes) store<E>(out + d, load<F>(state + d));
  if (d < p.head_dim) store<E>(out + d, load<F>(state + d), p.head_dim - d);
  const Statistics& s = statistics(state, width);
  p.lse[i] = s.lse;
  if (p.mass != nullptr) p.mass[2 * i] = s.mass[0], p.mass[2 * i + 1] = s.mass[1];
}

template <class E>
void decode(const StreamingDecodeParams& p) {
  const DecodeSplits splits(p);
  int64_t* first_split = splits.first_split();
  first_split[0] = 0;
  for (int64_t b = 0; b < p.batch; ++b) first_split[b + 1] = first_split[b] + splits.count(b);

  // KV heads run fastest: neighbours read the same pages.
  parallel_for(0, first_split[p.batch] * p.n_kv_heads, 1, [&](int64_t begin, int64_t end) {
    SplitKernel<E> kernel(p, splits);
    int64_t b = 0;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t split = i / p.n_kv_heads;
      while (first_split[b + 1] <= split) ++b;
      kernel(b, split, i % p.n_kv_heads);
    }
  });
  constexpr int64_t kGrain = 8;
  parallel_for(0, p.batch * p.n_heads, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      write_outputs<E>(p, splits, i / p.n_heads, i % p.n_heads);
    }
  });
}

}  // namespace

void run(const StreamingDecodeParams& p) {
  with_element(p.dtype, [&](auto element) { decode<decltype(element)>(p); });
}

}  // namespace lighttransfer::cpu::LIGHTTRANSFER_ISA
