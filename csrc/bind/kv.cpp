#include <algorithm>
#include <vector>

#include "backend.h"
#include "check.h"

namespace lighttransfer::bind {
namespace {

// For an op whose sizes are those of the caches and of seq_len.
template <class Params>
void check_cache(const Checker& check, const Tensor& k_cache, const Tensor& v_cache,
                 const Tensor& seq_len, const std::optional<Tensor>& block_table, Params& p) {
  check.shape(k_cache, "k_cache", kCacheShape, {kAny, kAny, kAny, kAny});
  check.shape(seq_len, "seq_len", "[B]", {kAny});
  p.batch = seq_len.size(0), p.n_kv_heads = k_cache.size(2), p.head_dim = k_cache.size(3);
  p.dtype = check.float_dtype(k_cache, "k_cache");
  check.head_dim("k_cache", p.head_dim);
  p.cache = check.kv_cache(k_cache, v_cache, block_table, p.batch, p.n_kv_heads, p.head_dim);
  p.seq_len = check.int32_vector(seq_len, "seq_len", p.batch);
}

// The pages that hold the positions [begin, end) of row b must be mapped.
void check_pages(const Checker& check, const KvCache& cache, int64_t b, Ring ring, int64_t begin,
                 int64_t end) {
  for (int64_t t = begin; t < end;) {
    const int64_t n = std::min(ring.run(t), end - t);
    check.pages(cache, b, ring.slot(t), ring.slot(t) + n);
    t += n;
  }
}

void check_rows(const Checker& check, const CompactKvParams& p) {
  std::vector<bool> seen(p.rows == nullptr ? 0 : p.batch);
  for (int64_t i = 0; i < p.n_rows; ++i) {
    const int64_t b = p.row(i);
    if (p.rows != nullptr) {
      check.row_value("rows", p.rows, i, 0, p.batch - 1);
      if (seen[b]) check.fail_value("rows", "name a row once", std::to_string(b) + " again");
      seen[b] = true;
    }
    const int64_t length = p.seq_len[b];
    if (length < 0) continue;
    check.capacity(p.cache, b, length);
    const int64_t begin = p.ring.move_begin(length);
    check.pages(p.cache, b, begin, length);
    check_pages(check, p.cache, b, p.ring, begin, length);
  }
}

template <class Backend>
void compact_kv_(const Tensor& k_cache, const Tensor& v_cache, const Tensor& seq_len,
                 int64_t n_sink, int64_t n_recent, const std::optional<Tensor>& block_table,
                 const std::optional<Tensor>& rows) {
  const Checker check("compact_kv_", k_cache, "k_cache");
  CompactKvParams p{};
  check_cache(check, k_cache, v_cache, seq_len, block_table, p);
  check.range("n_sink", n_sink, 0, kMaxPosition);
  check.range("n_recent", n_recent, 1, kMaxPosition);
  p.ring = {n_sink, n_recent};
  p.n_rows = p.batch;
  if (rows.has_value()) {
    check.shape(*rows, "rows", "[n_rows]", {kAny});
    p.n_rows = rows->size(0);
    p.rows = check.int32_vector(*rows, "rows", p.n_rows);
  }
  if (p.n_rows == 0) return;
  if (Backend::reads_tensors()) check_rows(check, p);
  if (k_cache.numel() > 0) Backend(k_cache).run(p);
}

void check_rows(const Checker& check, const AppendKvParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    if (p.seq_len[b] < 0) continue;
    check.row_value("n_recent", p.n_recent, b, 0, kMaxPosition);
    if (p.seq_start != nullptr) check.row_value("seq_start", p.seq_start, b, 0, p.n_tokens);
    const Ring ring = p.ring(b);
    const KeptPositions written = p.written(b);
    // The whole ring must fit, not only the slots of this chunk.
    check.capacity(p.cache, b, ring.n_slots(written.end));
    check_pages(check, p.cache, b, ring, written.begin, written.sink_end);
    check_pages(check, p.cache, b, ring, written.recent_begin, written.end);
  }
}

template <class Backend>
void append_kv_(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k, const Tensor& v,
                const Tensor& seq_len, int64_t n_sink, const Tensor& n_recent,
                const std::optional<Tensor>& block_table, const std::optional<Tensor>& seq_start) {
  const Checker check("append_kv_", k_cache, "k_cache");
  AppendKvParams p{};
  check.shape(k, "k", "[B, S, H_kv, D]", {kAny, kAny, kAny, kAny});
  p.batch = k.size(0), p.n_tokens = k.size(1), p.n_kv_heads = k.size(2), p.head_dim = k.size(3);
  p.dtype = check.float_dtype(k_cache, "k_cache");
  check.head_dim("k", p.head_dim);
  p.cache = check.kv_cache(k_cache, v_cache, block_table, p.batch, p.n_kv_heads, p.head_dim);
  const auto sizes = {p.batch, p.n_tokens, p.n_kv_heads, p.head_dim};
  p.k = check.activation(k, "k", "[B, S, H_kv, D]", sizes, k_cache.scalar_type());
  p.v = check.activation(v, "v", "[B, S, H_kv, D]", sizes, k_cache.scalar_type());
  p.seq_len = check.int32_vector(seq_len, "seq_len", p.batch);
  p.n_recent = check.int32_vector(n_recent, "n_recent", p.batch);
  p.seq_start = check.int32_vector(seq_start, "seq_start", p.batch);
  check.range("n_sink", n_sink, 0, kMaxPosition);
  check.range("k.size(1)", p.n_tokens, 0, kMaxPosition);
  p.n_sink = n_sink;
  if (Backend::reads_tensors()) check_rows(check, p);
  if (k.numel() > 0 && k_cache.numel() > 0) Backend(k_cache).run(p);
}

void check_rows(const Checker& check, const GatherKvParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    if (p.seq_len[b] < 0) continue;
    check.row_value("n_recent", p.n_recent, b, 0, kMaxPosition);
    const int64_t n_slots = p.ring(b).n_slots(p.seq_len[b]);
    check.capacity(p.cache, b, n_slots);
    check.pages(p.cache, b, 0, n_slots);
    if (n_slots > p.max_len) {
      check.fail_value("max_len",
                       "hold every row's cached tokens, " + std::to_string(n_slots) + " in row " +
                           std::to_string(b),
                       std::to_string(p.max_len));
    }
  }
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor> gather_kv(const Tensor& k_cache, const Tensor& v_cache,
                                             const Tensor& seq_len, int64_t n_sink,
                                             const Tensor& n_recent, int64_t max_len,
                                             const std::optional<Tensor>& block_table) {
  const Checker check("gather_kv", k_cache, "k_cache");
  GatherKvParams p{};
  check_cache(check, k_cache, v_cache, seq_len, block_table, p);
  p.n_recent = check.int32_vector(n_recent, "n_recent", p.batch);
  check.range("n_sink", n_sink, 0, kMaxPosition);
  check.range("max_len", max_len, 0, kMaxPosition);
  p.n_sink = n_sink, p.max_len = max_len;
  if (Backend::reads_tensors()) check_rows(check, p);

  const auto sizes = {p.batch, max_len, p.n_kv_heads, p.head_dim};
  Tensor k = new_output(k_cache, sizes, k_cache.scalar_type());
  Tensor v = new_output(k_cache, sizes, k_cache.scalar_type());
  Tensor seq_start = new_output(k_cache, {p.batch}, ScalarType::Int);
  p.k = as_activation(k), p.v = as_activation(v);
  p.seq_start = static_cast<int32_t*>(seq_start.data_ptr());
  if (p.batch > 0) Backend(k_cache).run(p);
  return {k, v, seq_start};
}

}  // namespace

LT_REGISTER_CPU(compact_kv_)
LT_REGISTER_CPU(append_kv_)
LT_REGISTER_CPU(gather_kv)

LT_REGISTER_CUDA(compact_kv_)
LT_REGISTER_CUDA(append_kv_)
LT_REGISTER_CUDA(gather_kv)

}  // namespace lighttransfer::bind
