// Checks of a cache's memory: layout, capacity, block table, alignment.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>

#include "check.h"

namespace lighttransfer::bind {
namespace {

// Do two index tuples of this strided layout ever name the same element? Exact for layouts in which
// the strides, sorted, nest (every view, transpose or slice of a dense tensor that matters here).
bool has_internal_overlap(const Tensor& t) {
  std::array<std::pair<int64_t, int64_t>, 8> dims;  // stride, size
  size_t n = 0;
  for (int64_t i = 0; i < t.dim() && n < dims.size(); ++i) {
    if (t.size(i) == 0) return false;
    if (t.size(i) > 1) dims[n++] = {t.stride(i), t.size(i)};
  }
  std::sort(dims.begin(), dims.begin() + n);
  int64_t extent = 1;
  for (size_t i = 0; i < n; ++i) {
    if (dims[i].first < extent) return true;
    extent = dims[i].first * (dims[i].second - 1) + extent;
  }
  return false;
}

}  // namespace

KvCache::Side Checker::cache_side(const Tensor& t, const char* argument,
                                  std::initializer_list<int64_t> sizes, ScalarType dtype) const {
  shape(t, argument, kCacheShape, sizes);
  this->dtype(t, argument, dtype);
  unit_stride(t, argument);
  if (has_internal_overlap(t)) {
    fail_value(argument, "have elements that do not overlap in memory",
               describe_strides(t) + " of shape " + describe_shape(t));
  }
  return {t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)};
}

KvCache Checker::kv_cache(const Tensor& k_cache, const Tensor& v_cache,
                          const std::optional<Tensor>& block_table, int64_t batch,
                          int64_t n_kv_heads, int64_t head_dim) const {
  const int64_t pages = block_table.has_value() ? kAny : batch;
  KvCache cache{};
  float_dtype(k_cache, "k_cache");
  cache.k =
      cache_side(k_cache, "k_cache", {pages, kAny, n_kv_heads, head_dim}, k_cache.scalar_type());
  cache.v = cache_side(v_cache, "v_cache", {k_cache.size(0), k_cache.size(1), n_kv_heads, head_dim},
                       k_cache.scalar_type());
  if (k_cache.numel() > 0 && cache.k.data == cache.v.data) {
    fail_value("v_cache", "not be the memory of k_cache", "the same address");
  }
  cache.n_pages = k_cache.size(0);
  cache.page_size = k_cache.size(1);
  cache.max_pages = 1;
  if (block_table.has_value()) {
    shape(*block_table, "block_table", "[B, max_pages]", {batch, kAny});
    dtype(*block_table, "block_table", ScalarType::Int);
    unit_stride(*block_table, "block_table");
    if (cache.page_size == 0) fail_value("k_cache", "have a page_size of at least 1", "0");
    cache.block_table = static_cast<const int32_t*>(block_table->data_ptr());
    cache.table_stride = block_table->stride(0);
    cache.max_pages = block_table->size(1);
    // Without elements the sizes are bounded by nothing.
    if (cache.max_pages > 0 && cache.page_size > INT64_MAX / cache.max_pages) {
      fail_value("k_cache", "have a page_size that max_pages can multiply",
                 std::to_string(cache.page_size));
    }
  }
  return cache;
}

void Checker::capacity(const KvCache& cache, int64_t b, int64_t n_slots) const {
  if (n_slots <= cache.capacity()) return;
  fail_value("seq_len",
             "leave every row within the cache's capacity of " + std::to_string(cache.capacity()) +
                 " slots",
             "a need for " + std::to_string(n_slots) + " in row " + std::to_string(b));
}

void Checker::pages(const KvCache& cache, int64_t b, int64_t begin, int64_t end) const {
  if (cache.block_table == nullptr || begin >= end) return;
  for (int64_t i = begin / cache.page_size; i <= (end - 1) / cache.page_size; ++i) {
    const int64_t page = cache.page(b, i * cache.page_size);
    if (page >= 0 && page < cache.n_pages) continue;
    fail_value(
        "block_table",
        "hold page ids in [0, " + std::to_string(cache.n_pages) + ") where the row has tokens",
        std::to_string(page) + " at [" + std::to_string(b) + ", " + std::to_string(i) + "]");
  }
}

bool has_aligned_rows(const Tensor& t) {
  if (t.numel() == 0) return true;
  bool aligned = reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;
  for (int64_t i = 0; i + 1 < t.dim(); ++i) {
    aligned = aligned && (t.size(i) == 1 || t.stride(i) * 2 % 16 == 0);
  }
  return aligned;
}

Tensor align_rows(const Tensor& t, Activation& activation) {
  const Tensor aligned = has_aligned_rows(t) ? t : torch::stable::clone(t);
  activation = as_activation(aligned);
  return aligned;
}

void Checker::aligned_rows(const Tensor& t, const char* argument) const {
  if (has_aligned_rows(t)) return;
  fail_value(argument, "have rows that start at multiples of 16 bytes on a GPU",
             describe_strides(t));
}

}  // namespace lighttransfer::bind
