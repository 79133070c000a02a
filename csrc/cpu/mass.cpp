// How much attention the last queries put on the keys that a window keeps: a small matrix product,
// whose columns are the kept keys in position order, and a sum over each row's exponentials.
//
// Keys are transposed tile by tile, so that a vector register holds one score per key: then neither
// the products nor the exponentials need sums across lanes. The query rows of all heads that share
// a KV head go over the same tile.
#include <cmath>

#include "kernels.h"
#include "parallel.h"
#include "simd_dot.h"

namespace lighttransfer::cpu::LIGHTTRANSFER_ISA {
namespace {

// The register block: kRows x kVectors accumulators, kVectors keys and one query value.
constexpr int kRows = 4;
#if defined(__AVX512F__)
constexpr int kVectors = 4;  // 32 registers
#elif defined(__AVX2__)
constexpr int kVectors = 3;  // 16 registers
#else
constexpr int kVectors = 2;  // 16 registers, and a product needs one before it is added
#endif
constexpr int kTileKeys = kVectors * kLanes;
constexpr int64_t kMaxTaskRows = 64;  // bounds the stack: the packed queries of one task
constexpr int64_t kMinTaskRows = 16;
constexpr int64_t kMaxUnits = 256;  // the largest head_dim

// A head vector is cut into units of 4 bytes, which a register holds one per lane: an fp32 value,
// or a pair of bf16 where the instruction set multiplies pairs.
template <class E>
struct Units {
  using Operand = typename Dot<E>::Operand;
  using Storage = typename E::Storage;
  static constexpr int kElements = Dot<E>::kWidth / kLanes;  // in one unit
  static constexpr bool kAsStored = kElements * sizeof(Storage) == 4;

  // Writes whole vectors where it widens: `to` needs kLanes units of slack.
  static inline void pack(const Storage* row, int64_t head_dim, int32_t* to) {
    if constexpr (kAsStored) {
      std::memcpy(to, row, head_dim * sizeof(Storage));
    } else {
      for (int64_t d = 0; d < head_dim; d += kLanes) {
        const int64_t rest = head_dim - d;
        const Vec v = rest < kLanes ? load<E>(row + d, rest) : load<E>(row + d);
        std::memcpy(to + d, &v, sizeof(v));
      }
    }
  }
};

// One thread's share: some of the rows (query heads of one KV head x queries) of one batch row.
struct Task {
  const RetainedMassParams& p;
  int64_t b, kv_head, row_begin, row_end;
  int64_t start;  // the batch row's first real key
  KeptPositions kept;

  int64_t head(int64_t row) const {
    return kv_head * (p.n_heads / p.n_kv_heads) + row / p.n_queries;
  }
  int64_t query(int64_t row) const { return row % p.n_queries; }
  // Kept keys that the row's query sees: they come first. Query i stands at key S_k - S_q + i.
  int64_t n_visible(int64_t row) const {
    const int64_t position = p.n_keys - p.n_queries + query(row) - start;
    return position < 0 ? 0 : kept.size_below(position + 1);
  }
  float lse(int64_t row) const {
    return p
        .lse[b * p.lse_strides[0] + head(row) * p.lse_strides[1] + query(row) * p.lse_strides[2]];
  }
  template <class Storage>
  const Storage* q_row(int64_t row) const {
    return static_cast<const Storage*>(p.q.data) + b * p.q.batch_stride +
           query(row) * p.q.token_stride + head(row) * p.q.head_stride;
  }
  template <class Storage>
  const Storage* kept_key(int64_t i) const {
    return static_cast<const Storage*>(p.k.data) + b * p.k.batch_stride +
           (start + kept[i]) * p.k.token_stride + kv_head * p.k.head_stride;
  }
};

typedef int32_t Quad __attribute__((vector_size(16)));

// Transposes the kept keys [first, first + kTileKeys) to tile[unit][key]; zeros behind the last
// one.
template <class E>
void pack_keys(const Task& task, int64_t first, int64_t n_units, int32_t* tile) {
  int32_t units[4][kMaxUnits + kLanes];
  for (int key = 0; key < kTileKeys; key += 4) {
    for (int64_t i = 0; i < 4; ++i) {
      const int64_t index = first + key + i;
      if (index < task.kept.size()) {
        const auto* row = task.kept_key<typename E::Storage>(index);
        Units<E>::pack(row, task.p.head_dim, units[i]);
      } else {
        std::memset(units[i], 0, n_units * 4);
      }
    }
    for (int64_t u = 0; u < n_units; u += 4) {  // head_dim is a multiple of 8
      Quad row[4];
      for (int i = 0; i < 4; ++i) std::memcpy(&row[i], units[i] + u, sizeof(Quad));
      const Quad a = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5);
      const Quad b = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5);
      const Quad c = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7);
      const Quad d = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
      const Quad column[4] = {
          __builtin_shufflevector(a, b, 0, 1, 4, 5), __builtin_shufflevector(a, b, 2, 3, 6, 7),
          __builtin_shufflevector(c, d, 0, 1, 4, 5), __builtin_shufflevector(c, d, 2, 3, 6, 7)};
      for (int i = 0; i < 4; ++i) {
        std::memcpy(tile + (u + i) * kTileKeys + key, &column[i], sizeof(Quad));
      }
    }
  }
}

// scores[row][vector]: the products of kRows packed queries with a tile of keys.
template <class E>
inline void multiply(const int32_t* q, int64_t n_units, const int32_t* tile,
                     Vec (&scores)[kRows][kVectors]) {
  using Operand = typename Units<E>::Operand;
  Vec acc[kRows][kVectors] = {};
  for (int64_t u = 0; u < n_units; ++u) {
    Operand k[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      std::memcpy(&k[v], tile + u * kTileKeys + v * kLanes, sizeof(Operand));
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Operand x = bit_cast<Operand>(q[r * n_units + u] - IntVec{});  // to every lane
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v] = Dot<E>::madd(x, k[v], acc[r][v]);
    }
  }
  std::memcpy(&scores, &acc, sizeof(acc));
}

// The running sums of one query row, lane by lane.
struct RowSums {
  Vec sinks, others;
  float lse;
  int64_t n_visible;
};

// v where the lane's number is below n, else 0 (also in place of a NaN).
inline Vec keep_below(Vec v, int64_t n, IntVec lane_numbers) {
  const IntVec mask = lane_numbers < static_cast<int32_t>(n);
  return bit_cast<Vec>(bit_cast<IntVec>(v) & mask);
}

// Adds the probabilities of the kept keys [first, first + kTileKeys) to a row's sums.
inline void add_tile(const Vec (&scores)[kVectors], int64_t first, int64_t n_sink, float scale,
                     IntVec lane_numbers, RowSums& row) {
  for (int v = 0; v < kVectors; ++v) {
    const int64_t begin = first + v * kLanes;
    if (begin >= row.n_visible) return;
    Vec p = exp(fma(scores[v], broadcast(scale), broadcast(-row.lse)));
    if (begin + kLanes > row.n_visible) p = keep_below(p, row.n_visible - begin, lane_numbers);
    if (begin >= n_sink) {
      row.others = row.others + p;
      continue;
    }
    const Vec sinks = begin + kLanes > n_sink ? keep_below(p, n_sink - begin, lane_numbers) : p;
    row.sinks = row.sinks + sinks;
    row.others = row.others + bit_cast<Vec>(bit_cast<IntVec>(p) ^ bit_cast<IntVec>(sinks));
  }
}

template <class E>
void measure(const Task& task) {
  const RetainedMassParams& p = task.p;
  const int64_t n_units = p.head_dim / Units<E>::kElements;
  const int64_t n_rows = task.row_end - task.row_begin;
  int32_t q[kMaxTaskRows * kMaxUnits + kLanes];
  alignas(64) int32_t tile[kMaxUnits * kTileKeys];
  RowSums rows[kMaxTaskRows];
  int64_t n_visible = 0;                                              // by any row
  for (int64_t i = 0; i < kMaxTaskRows && i < n_rows + kRows; ++i) {  // to the end of a block
    const int64_t row = task.row_begin + i;
    if (i >= n_rows) {
      std::memset(q + i * n_units, 0, n_units * 4);
      continue;
    }
    Units<E>::pack(task.q_row<typename E::Storage>(row), p.head_dim, q + i * n_units);
    rows[i] = {Vec{}, Vec{}, task.lse(row), task.n_visible(row)};
    if (rows[i].n_visible > n_visible) n_visible = rows[i].n_visible;
  }
  int32_t numbers[kLanes];
  for (int i = 0; i < kLanes; ++i) numbers[i] = i;
  IntVec lane_numbers;
  std::memcpy(&lane_numbers, numbers, sizeof(lane_numbers));

  const int64_t n_sink = task.kept.sink_end;
  for (int64_t first = 0; first < n_visible; first += kTileKeys) {
    pack_keys<E>(task, first, n_units, tile);
    for (int64_t block = 0; block < n_rows; block += kRows) {
      Vec scores[kRows][kVectors];
      multiply<E>(q + block * n_units, n_units, tile, scores);
      for (int64_t r = 0; r < kRows && block + r < n_rows; ++r) {
        add_tile(scores[r], first, n_sink, p.scale, lane_numbers, rows[block + r]);
      }
    }
  }

  for (int64_t i = 0; i < n_rows; ++i) {
    const int64_t row = task.row_begin + i;
    float* mass =
        p.mass + ((task.b * p.n_heads + task.head(row)) * p.n_queries + task.query(row)) * 2;
    const bool empty = rows[i].lse == -INFINITY;  // a query that attends to nothing
    mass[0] = empty ? 0.0f : reduce_add(rows[i].sinks);
    mass[1] = empty ? 0.0f : reduce_add(rows[i].others);
  }
}

}  // namespace

void run(const RetainedMassParams& p) {
  const int64_t n_groups = p.batch * p.n_kv_heads;
  if (n_groups == 0 || p.n_queries == 0) return;

  // Every task transposes its keys again, so there are no more than keep the threads busy.
  const int64_t n_rows = p.n_heads / p.n_kv_heads * p.n_queries;
  const int64_t wanted = n_threads() == 1 ? 1 : (4 * n_threads() + n_groups - 1) / n_groups;
  int64_t task_rows = (n_rows + wanted - 1) / wanted;
  task_rows = (task_rows + kMinTaskRows - 1) / kMinTaskRows * kMinTaskRows;
  if (task_rows > kMaxTaskRows) task_rows = kMaxTaskRows;
  const int64_t n_blocks = (n_rows + task_rows - 1) / task_rows;

  with_element(p.dtype, [&](auto element) {
    parallel_for(0, n_groups * n_blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t group = i / n_blocks, b = group / p.n_kv_heads;
        const int64_t row_begin = i % n_blocks * task_rows;
        const int64_t row_end = row_begin + task_rows < n_rows ? row_begin + task_rows : n_rows;
        const int64_t start = p.seq_start == nullptr ? 0 : p.seq_start[b];
        measure<decltype(element)>({p, b, group % p.n_kv_heads, row_begin, row_end, start,
                                    p.window.kept_positions(0, p.n_keys - start)});
      }
    });
  });
}

// The mean in double: the sum of many fp32 probabilities would lose digits.
void run(const LazyRatioParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t n_queries = p.n_queries == nullptr ? p.n_last : p.n_queries[b];
    double sum = 0.0;
    for (int64_t h = 0; h < p.n_heads; ++h) {
      const float* head = p.mass + (b * p.n_heads + h) * p.n_last * 2;
      for (int64_t i = (p.n_last - n_queries) * 2; i < p.n_last * 2; ++i) sum += head[i];
    }
    const int64_t n = p.n_heads * n_queries;
    p.ratio[b] = n == 0 ? 1.0f : static_cast<float>(sum / static_cast<double>(n));
  }
}

}  // namespace lighttransfer::cpu::LIGHTTRANSFER_ISA
