// Argument checks. An error names the op, the argument, the rule and the value it got. Its text
// starts with "ValueError: " or "TypeError: ", which lighttransfer/ops turns into that exception.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <string>

#include "../params.h"

namespace lighttransfer::bind {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A dimension's required size; kAny accepts every size.
constexpr int64_t kAny = -1;
constexpr int64_t kMaxHeadDim = 256;
constexpr const char* kCacheShape = "[n_pages or B, page_size or capacity, H_kv, D]";
constexpr int64_t kMaxPosition = INT32_MAX;  // lengths and positions lie in int32 tensors

// Checks for one call of the op `op`; holds the device that all of its tensors must share.
class Checker {
 public:
  // `first`, the op's first tensor, is the argument of that name.
  Checker(const char* op, const Tensor& first, const char* argument);

  [[noreturn]] void fail_value(const char* argument, const std::string& rule,
                               const std::string& got) const;
  [[noreturn]] void fail_type(const char* argument, const std::string& rule,
                              const std::string& got) const;

  // `value` must lie in [low, high].
  void range(const char* argument, int64_t value, int64_t low, int64_t high) const;

  // Rank, sizes (kAny passes) and device. `shape` is the text of the rule: "[B, S, H, D]".
  void shape(const Tensor& t, const char* argument, const char* shape,
             std::initializer_list<int64_t> sizes) const;

  void dtype(const Tensor& t, const char* argument, ScalarType expected) const;
  // fp16 or bf16; on the CPU also fp32.
  DType float_dtype(const Tensor& t, const char* argument) const;
  // A multiple of 8 between 8 and 256.
  void head_dim(const char* argument, int64_t d) const;
  void heads(int64_t n_heads, int64_t n_kv_heads) const;
  // The softmax scale, 1 / sqrt(head_dim) where it is None: positive and finite in fp32.
  float scale(std::optional<double> scale, int64_t head_dim) const;

  // The last dimension must have unit stride (a dimension of size 0 or 1 has any).
  void unit_stride(const Tensor& t, const char* argument) const;

  // A [B, S, H, D] tensor of dtype `like`'s: shape, dtype and unit stride.
  Activation activation(const Tensor& t, const char* argument, const char* shape,
                        std::initializer_list<int64_t> sizes, ScalarType dtype) const;

  // An int32 [n] tensor on the same device, contiguous; nullptr where the argument is None.
  const int32_t* int32_vector(const std::optional<Tensor>& t, const char* argument,
                              int64_t n) const;
  const int32_t* int32_vector(const Tensor& t, const char* argument, int64_t n) const;

  // Every one of the n values must lie in [low, high]. Reads them: host memory only.
  void row_range(const char* argument, const int32_t* values, int64_t n, int64_t low,
                 int64_t high) const;
  // The same for values[b] alone.
  void row_value(const char* argument, const int32_t* values, int64_t b, int64_t low,
                 int64_t high) const;

  // k_cache, v_cache and block_table of a layer: see KvCache. The two caches must not be the same
  // memory, and no two elements of one may alias (no zero strides).
  KvCache kv_cache(const Tensor& k_cache, const Tensor& v_cache,
                   const std::optional<Tensor>& block_table, int64_t batch, int64_t n_kv_heads,
                   int64_t head_dim) const;

  // For kernels that load 16 bytes at a time and write in place, so that no copy can help.
  void aligned_rows(const Tensor& t, const char* argument) const;

  // Row b needs `n_slots` slots: they must lie within the cache's capacity.
  void capacity(const KvCache& cache, int64_t b, int64_t n_slots) const;
  // The block table must map the slots [begin, end) of row b, which lie within the capacity. It is
  // read, so for tensors on the CPU only.
  void pages(const KvCache& cache, int64_t b, int64_t begin, int64_t end) const;

 private:
  // Python's None reaches a Tensor argument as an undefined tensor.
  const Tensor& defined(const Tensor& t, const char* argument) const;
  KvCache::Side cache_side(const Tensor& t, const char* argument,
                           std::initializer_list<int64_t> sizes, ScalarType dtype) const;

  const char* op_;
  torch::stable::Device device_;
};

// Uninitialised contiguous output on the device of `like`.
Tensor new_output(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType dtype);
Activation as_activation(const Tensor& t);

// Do all rows (the last dimension) of a 16-bit tensor start at multiples of 16 bytes?
bool has_aligned_rows(const Tensor& t);
// For kernels that load 16 bytes at a time: points the activation at the tensor, or at a copy of it
// where its rows are not aligned. The caller holds what comes back until the launch.
Tensor align_rows(const Tensor& t, Activation& activation);

std::string describe_shape(const Tensor& t);
std::string describe_strides(const Tensor& t);  // "strides [...]"

}  // namespace lighttransfer::bind
