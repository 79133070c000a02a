#include "decode_item.h"
#include "decode_scores.h"
#include "decode_softmax.h"
#include "decode_state.h"
#include "decode_values.h"
#include "kernels.h"

namespace lighttransfer::cpu::LIGHTTRANSFER_ISA {
namespace {

// body(n) with n <= max known to the compiler.
template <int max, class Body>
inline void with_heads(std::integral_constant<int, max> heads, int64_t n, const Body& body) {
  if constexpr (max > 1) {
    if (n < max) return with_heads(std::integral_constant<int, max - 1>{}, n, body);
  }
  body(heads);
}

template <class E>
class SplitKernel {
 public:
  using T = typename E::Storage;

  SplitKernel(const StreamingDecodeParams& p, const DecodeSplits& splits)
      : p_(p),
        splits_(splits),
        group_(p.n_heads / p.n_kv_heads),
        tile_slots_(tile_slots(p, sizeof(T))) {}

  // `next`: the item that follows, nullptr: none.
  void operator()(const SplitItem& item, const SplitItem* next) {
    const Ring ring = p_.ring(item.b);
    const int64_t length = int64_t{p_.seq_len[item.b]} + 1;
    if (p_.mass != nullptr) ranges_ = mass_ranges(ring, p_.window, length);
    const int64_t new_slot = ring.slot(length - 1);
    if (item.begin <= new_slot && new_slot < item.end) {
      for (int64_t h = 0; h < item.n_kv_heads; ++h) {
        write_token(item.b, new_slot, item.kv_head + h);
      }
    }
    // Further blocks of heads find the split's keys and values in the cache of this core.
    const int64_t per_head = (group_ + kHeads - 1) / kHeads;
    const int64_t n_blocks = item.n_kv_heads * per_head;
    for (int64_t first = 0; first < n_blocks; first += kMaxBlocks) {
      const int64_t end = first + kMaxBlocks < n_blocks ? first + kMaxBlocks : n_blocks;
      n_blocks_ = 0;
      for (int64_t i = first; i < end; ++i) add_block(item, i / per_head, i % per_head * kHeads);
      attend(item, end < n_blocks ? &item : next);
      for (int64_t i = 0; i < n_blocks_; ++i) finish(blocks_[i]);
    }
  }

 private:
  // A block of query heads of one KV head.
  struct Block {
    int64_t kv_head;  // of the item's
    int64_t n;        // heads
    BlockOutputs outputs;
    BlockSoftmax softmax;
    BlockQueries<E> queries;
  };

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

  // The query heads from g on of the item's KV head kv_head.
  void add_block(const SplitItem& item, int64_t kv_head, int64_t g) {
    Block& block = blocks_[n_blocks_++];
    const int64_t h = (item.kv_head + kv_head) * group_ + g;
    block.kv_head = kv_head;
    block.n = group_ - g < kHeads ? group_ - g : kHeads;
    block.outputs = {splits_.state(item.split, h), splits_.stride()};
    for (int i = 0; i < block.n; ++i) {
      std::memset(block.outputs.head(i), 0, splits_.padded_head_dim() * sizeof(float));
    }
    block.softmax.clear();
    const T* q =
        static_cast<const T*>(p_.q.data) + item.b * p_.q.batch_stride + h * p_.q.head_stride;
    block.queries.load(q, p_.q.head_stride, block.n, p_.head_dim);
  }

  // The blocks over the item's tiles. Memory is kept busy: while a tile is computed, the next one
  // is on its way, behind the last tile the first one of `next`.
  void attend(const SplitItem& item, const SplitItem* next) {
    const auto find = [&](const SplitItem& from, int64_t tile, TileRows<T>& rows) {
      const int64_t end = tile + tile_slots_ < from.end ? tile + tile_slots_ : from.end;
      find_rows(p_.cache, from.b, from.kv_head, tile, end, rows);
    };
    int current = 0;
    find(item, item.begin, rows_[0]);
    for (int64_t tile = item.begin; tile < item.end; tile += tile_slots_, current ^= 1) {
      TileRows<T>& ahead = rows_[current ^ 1];
      int64_t n_ahead = item.n_kv_heads;
      if (tile + tile_slots_ < item.end) {
        find(item, tile + tile_slots_, ahead);
      } else if (next != nullptr) {
        find(*next, next->begin, ahead);
        n_ahead = next->n_kv_heads;
      } else {
        ahead.n = 0;
      }
      attend_tile(rows_[current], ahead, n_ahead);
    }
  }

  void attend_tile(const TileRows<T>& rows, const TileRows<T>& ahead, int64_t n_ahead) {
    const auto stream = [&](const KvCache::Side& side, const T* const* from) {
      RowStream s = RowStream::of(side, n_ahead, p_.head_dim, sizeof(T));
      s.start(from, ahead.n);
      return s;
    };
    RowStream k = stream(p_.cache.k, ahead.k), v = stream(p_.cache.v, ahead.v);
    const auto share = [&](const RowStream& s) { return (s.units() + n_blocks_ - 1) / n_blocks_; };
    const int64_t k_units = share(k), v_units = share(v);
    for (int64_t i = 0; i < n_blocks_; ++i) {
      Block& block = blocks_[i];
      const ValueRows<E> values{rows.v, block.kv_head * p_.cache.v.head_stride, rows.n};
      with_heads(std::integral_constant<int, kHeads>{}, block.n, [&](auto n_heads) {
        block.queries.template score<n_heads>(
            rows.k, rows.n, block.kv_head * p_.cache.k.head_stride, p_.scale, k, k_units, scores_);
        softmax_tile(scores_, rows.n, block.softmax, correction_);
        if (p_.mass != nullptr) add_masses(rows, block.softmax);
        Weighting<E>::prepare(scores_, rows.n);
        accumulate_tile<E, n_heads>(values, scores_, correction_, p_.head_dim, block.outputs, v,
                                    v_units);
      });
    }
  }

  void add_masses(const TileRows<T>& rows, BlockSoftmax& softmax) const {
    const auto add = [&](SlotRange range, Vec* sums) {
      add_range(scores_, rows.n, range.begin - rows.begin, range.end - rows.begin, sums);
    };
    add(ranges_.sinks, softmax.sinks);
    for (SlotRange range : ranges_.recent) add(range, softmax.recent);
  }

  // The block's heads become states: outputs and masses divided by their sums.
  void finish(const Block& block) const {
    const int64_t width = splits_.padded_head_dim();
    for (int i = 0; i < block.n; ++i) {
      const int w = i / kGroups, lane = i % kGroups * 4;
      const BlockSoftmax& s = block.softmax;
      const float max = s.max[w][lane], sum = group_add(s.sum[w])[lane];
      const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
      float* state = block.outputs.head(i);
      for (int64_t d = 0; d < width; d += kLanes) {
        store<F32>(state + d, load<F32>(state + d) * inverse);
      }
      statistics(state, width) = {
          max + logf(sum),
          {group_add(s.sinks[w])[lane] * inverse, group_add(s.recent[w])[lane] * inverse}};
    }
  }

  const StreamingDecodeParams& p_;
  const DecodeSplits& splits_;
  const int64_t group_;  // query heads of a KV head
  const int64_t tile_slots_;
  MassRanges ranges_{};
  TileRows<T> rows_[2];
  int64_t n_blocks_ = 0;
  Block blocks_[kMaxBlocks];
  TileScores scores_;
  float correction_[kHeads];
};

// The outputs of one query head of one row, from its splits: merged as a binary tree, so that
// rounding grows with the logarithm of their number.
template <class E>
void write_outputs(const StreamingDecodeParams& p, const DecodeSplits& splits, int64_t b,
                   int64_t h) {
  using T = typename E::Storage;
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
  narrow_row<E>(state, p.head_dim, out);
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

  const HeadGroups groups(p, first_split[p.batch], sizeof(typename E::Storage));
  // Groups of KV heads run fastest: neighbours read the same pages.
  parallel_for(0, first_split[p.batch] * groups.count, 1, [&](int64_t begin, int64_t end) {
    SplitKernel<E> kernel(p, splits);
    int64_t b = 0;
    const auto item = [&](int64_t i) {
      while (first_split[b + 1] <= i / groups.count) ++b;
      return SplitItem(p, splits, groups, b, i);
    };
    SplitItem current = item(begin);
    for (int64_t i = begin + 1; i < end; ++i) {
      const SplitItem next = item(i);
      kernel(current, &next);
      current = next;
    }
    kernel(current, nullptr);
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
