// What the kernels of one op may touch, told to the simulator for the duration of the launch:
// exactly the elements of each tensor, not its storage, so that a step outside of a view is found.
#pragma once

#include <initializer_list>
#include <vector>

#include "../../../csrc/params.h"

extern "C" {
void cudasim_register_buffer(const void* data, size_t bytes, int writable, const char* name);
void cudasim_unregister_buffer(const void* data);
}

namespace lighttransfer::simulator {

class Buffers {
 public:
  template <class Params>
  explicit Buffers(const Params& p) {
    add(p);
  }
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;
  ~Buffers() {
    for (const void* p : registered_) cudasim_unregister_buffer(p);
  }

  void bytes(const void* data, int64_t n, bool writable, const char* name) {
    if (data == nullptr || n <= 0) return;
    cudasim_register_buffer(data, static_cast<size_t>(n), writable, name);
    registered_.push_back(data);
  }

 private:
  struct Dim {
    int64_t size, stride;
  };

  static int64_t element_bytes(DType t) { return t == DType::kFloat32 ? 4 : 2; }

  void strided(const void* data, int64_t element, std::initializer_list<Dim> dims, bool writable,
               const char* name) {
    int64_t last = 0;
    for (const Dim& d : dims) {
      if (d.size <= 0) return;
      last += (d.size - 1) * d.stride;
    }
    bytes(data, (last + 1) * element, writable, name);
  }
  void activation(const Activation& a, DType t, int64_t b, int64_t s, int64_t h, int64_t d,
                  bool writable, const char* name) {
    strided(a.data, element_bytes(t),
            {{b, a.batch_stride}, {s, a.token_stride}, {h, a.head_stride}, {d, 1}}, writable, name);
  }
  void lse(const float* data, const int64_t* strides, int64_t b, int64_t h, int64_t s,
           bool writable, const char* name) {
    strided(data, 4, {{b, strides[0]}, {h, strides[1]}, {s, strides[2]}}, writable, name);
  }
  void vector(const int32_t* data, int64_t n, const char* name, bool writable = false) {
    bytes(data, n * 4, writable, name);
  }
  void cache(const KvCache& c, DType t, int64_t b, int64_t h, int64_t d, bool writable) {
    const auto side = [&](const KvCache::Side& s, const char* name) {
      strided(
          s.data, element_bytes(t),
          {{c.n_pages, s.page_stride}, {c.page_size, s.slot_stride}, {h, s.head_stride}, {d, 1}},
          writable, name);
    };
    side(c.k, "k_cache");
    side(c.v, "v_cache");
    strided(c.block_table, 4, {{b, c.table_stride}, {c.max_pages, 1}}, false, "block_table");
  }

  void add(const AttentionParams& p) {
    activation(p.q, p.dtype, p.batch, p.n_queries, p.n_heads, p.head_dim, false, "q");
    activation(p.k, p.dtype, p.batch, p.n_keys, p.n_kv_heads, p.head_dim, false, "k");
    activation(p.v, p.dtype, p.batch, p.n_keys, p.n_kv_heads, p.head_dim, false, "v");
    activation(p.out, p.dtype, p.batch, p.n_queries, p.n_heads, p.head_dim, true, "out");
    bytes(p.lse, p.batch * p.n_heads * p.n_queries * 4, true, "lse");
    bytes(p.mass, p.batch * p.n_heads * p.n_last * 8, true, "mass");
    vector(p.seq_start, p.batch, "seq_start");
  }
  void add(const RetainedMassParams& p) {
    activation(p.q, p.dtype, p.batch, p.n_queries, p.n_heads, p.head_dim, false, "q_last");
    activation(p.k, p.dtype, p.batch, p.n_keys, p.n_kv_heads, p.head_dim, false, "k");
    lse(p.lse, p.lse_strides, p.batch, p.n_heads, p.n_queries, false, "lse_last");
    bytes(p.mass, p.batch * p.n_heads * p.n_queries * 8, true, "mass");
    vector(p.seq_start, p.batch, "seq_start");
  }
  void add(const LazyRatioParams& p) {
    bytes(p.mass, p.batch * p.n_heads * p.n_last * 8, false, "mass");
    vector(p.n_queries, p.batch, "n_queries");
    bytes(p.ratio, p.batch * 4, true, "ratio");
  }
  void add(const CompactKvParams& p) {
    cache(p.cache, p.dtype, p.batch, p.n_kv_heads, p.head_dim, true);
    vector(p.seq_len, p.batch, "seq_len");
    vector(p.rows, p.n_rows, "rows");
  }
  void add(const AppendKvParams& p) {
    cache(p.cache, p.dtype, p.batch, p.n_kv_heads, p.head_dim, true);
    activation(p.k, p.dtype, p.batch, p.n_tokens, p.n_kv_heads, p.head_dim, false, "k");
    activation(p.v, p.dtype, p.batch, p.n_tokens, p.n_kv_heads, p.head_dim, false, "v");
    vector(p.seq_len, p.batch, "seq_len");
    vector(p.n_recent, p.batch, "n_recent");
    vector(p.seq_start, p.batch, "seq_start");
  }
  void add(const GatherKvParams& p) {
    cache(p.cache, p.dtype, p.batch, p.n_kv_heads, p.head_dim, false);
    activation(p.k, p.dtype, p.batch, p.max_len, p.n_kv_heads, p.head_dim, true, "k");
    activation(p.v, p.dtype, p.batch, p.max_len, p.n_kv_heads, p.head_dim, true, "v");
    vector(p.seq_len, p.batch, "seq_len");
    vector(p.n_recent, p.batch, "n_recent");
    vector(p.seq_start, p.batch, "seq_start", true);
  }
  void add(const StreamingDecodeParams& p) {
    activation(p.q, p.dtype, p.batch, 1, p.n_heads, p.head_dim, false, "q");
    activation(p.k, p.dtype, p.batch, 1, p.n_kv_heads, p.head_dim, false, "k");
    activation(p.v, p.dtype, p.batch, 1, p.n_kv_heads, p.head_dim, false, "v");
    activation(p.out, p.dtype, p.batch, 1, p.n_heads, p.head_dim, true, "out");
    cache(p.cache, p.dtype, p.batch, p.n_kv_heads, p.head_dim, true);
    vector(p.seq_len, p.batch, "seq_len");
    vector(p.n_recent, p.batch, "n_recent");
    bytes(p.lse, p.batch * p.n_heads * 4, true, "lse");
    bytes(p.mass, p.batch * p.n_heads * 8, true, "mass");
  }
  void add(const MergeStatesParams& p) {
    activation(p.out_a, p.dtype, p.batch, p.n_tokens, p.n_heads, p.head_dim, false, "out_a");
    activation(p.out_b, p.dtype, p.batch, p.n_tokens, p.n_heads, p.head_dim, false, "out_b");
    activation(p.out, p.dtype, p.batch, p.n_tokens, p.n_heads, p.head_dim, true, "out");
    lse(p.lse_a, p.lse_a_strides, p.batch, p.n_heads, p.n_tokens, false, "lse_a");
    lse(p.lse_b, p.lse_b_strides, p.batch, p.n_heads, p.n_tokens, false, "lse_b");
    lse(p.lse, p.lse_strides, p.batch, p.n_heads, p.n_tokens, true, "lse");
  }

  std::vector<const void*> registered_;
};

}  // namespace lighttransfer::simulator
