// What an op hands to a backend: one plain struct per op, shared by CPU and CUDA. No torch here.
// Strides count elements; the last dimension always has unit stride. Every pointer is valid for the
// shape in its comment; sizes are already checked against each other by bind/.
//
//   B batch rows   S_q queries   S_k keys   H_q query heads   H_kv KV heads   D head_dim
#pragma once

#include <cstdint>

#include "window.h"

namespace lighttransfer {

enum class DType : int32_t { kFloat32, kFloat16, kBFloat16 };

// Queries, keys, values or outputs of a call.
struct Activation {
  void* data;  // [B, S, H, D]
  int64_t batch_stride, token_stride, head_stride;
};

// One layer's K/V: pages shared by all layers, or one contiguous run per row.
struct KvCache {
  struct Side {
    void* data;  // [n_pages, page_size, H_kv, D]; contiguous: [B, capacity, H_kv, D]
    int64_t page_stride, slot_stride, head_stride;
  };
  Side k, v;
  const int32_t* block_table;  // [B, max_pages], nullptr: row b is page b
  int64_t table_stride;        // of block_table's rows
  int64_t n_pages, page_size, max_pages;

  // Slots that a row can address.
  LT_HOST_DEVICE constexpr int64_t capacity() const {
    return block_table == nullptr ? page_size : max_pages * page_size;
  }
  // The page that holds `slot` of row b; below 0 or at least n_pages: the table does not map it.
  LT_HOST_DEVICE constexpr int64_t page(int64_t b, int64_t slot) const {
    return block_table == nullptr ? b : block_table[b * table_stride + slot / page_size];
  }
};

// prefill_attn and prefill_attn_lazy.
struct AttentionParams {
  Activation q, k, v, out;   // [B, S_q, H_q, D], [B, S_k, H_kv, D] twice, [B, S_q, H_q, D]
  float* lse;                // [B, H_q, S_q] contiguous, natural log
  float* mass;               // [B, H_q, n_last, 2] contiguous, nullptr: not asked for
  const int32_t* seq_start;  // [B], in [0, S_k], nullptr: all 0
  DType dtype;
  int64_t batch, n_queries, n_keys, n_heads, n_kv_heads, head_dim;
  float scale;
  bool causal;            // bottom-right aligned: query i stands at key S_k - S_q + i
  RetainedWindow mask;    // the streaming mask, unlimited: plain attention
  RetainedWindow window;  // the window whose mass is measured
  int64_t n_last;
};

struct RetainedMassParams {
  Activation q, k;   // [B, S_q, H_q, D] the last S_q queries, [B, S_k, H_kv, D]
  const float* lse;  // [B, H_q, S_q], of those queries over all their keys
  int64_t lse_strides[3];
  float* mass;               // [B, H_q, S_q, 2] contiguous
  const int32_t* seq_start;  // [B], in [0, S_k], nullptr: all 0
  DType dtype;
  int64_t batch, n_queries, n_keys, n_heads, n_kv_heads, head_dim;
  float scale;
  RetainedWindow window;
};

struct LazyRatioParams {
  const float* mass;         // [B, H_q, n_last, 2] contiguous
  const int32_t* n_queries;  // [B], how many trailing rows are real, nullptr: all n_last
  float* ratio;              // [B]
  int64_t batch, n_heads, n_last;
};

struct CompactKvParams {
  KvCache cache;
  const int32_t* seq_len;  // [B], below 0: the row is left alone
  const int32_t* rows;     // [n_rows] rows to compact, nullptr: all
  DType dtype;
  int64_t batch, n_rows, n_kv_heads, head_dim;
  Ring ring;

  // The i-th row to compact.
  LT_HOST_DEVICE constexpr int64_t row(int64_t i) const { return rows == nullptr ? i : rows[i]; }
};

struct AppendKvParams {
  KvCache cache;
  Activation k, v;           // [B, S, H_kv, D]
  const int32_t* seq_len;    // [B], tokens cached before the call, below 0: the row is left alone
  const int32_t* n_recent;   // [B], 0: full row
  const int32_t* seq_start;  // [B], first real token of the chunk, nullptr: all 0
  DType dtype;
  int64_t batch, n_tokens, n_kv_heads, head_dim;
  int64_t n_sink;

  LT_HOST_DEVICE constexpr Ring ring(int64_t b) const { return {n_sink, n_recent[b]}; }
  LT_HOST_DEVICE constexpr int64_t start(int64_t b) const {
    return seq_start == nullptr ? 0 : seq_start[b];
  }
  // The positions that row b's chunk writes; position t comes from chunk index
  // start(b) + t - seq_len[b].
  LT_HOST_DEVICE constexpr KeptPositions written(int64_t b) const {
    return ring(b).kept(seq_len[b], seq_len[b] + (n_tokens - start(b)));
  }
};

struct GatherKvParams {
  KvCache cache;
  Activation k, v;          // [B, max_len, H_kv, D], position order, right-aligned
  const int32_t* seq_len;   // [B], tokens cached
  const int32_t* n_recent;  // [B], 0: full row
  int32_t* seq_start;       // [B], first filled index of k and v
  DType dtype;
  int64_t batch, max_len, n_kv_heads, head_dim;
  int64_t n_sink;

  LT_HOST_DEVICE constexpr Ring ring(int64_t b) const { return {n_sink, n_recent[b]}; }
};

struct StreamingDecodeParams {
  Activation q, k, v, out;  // [B, 1, H_q, D], [B, 1, H_kv, D] twice, [B, 1, H_q, D]
  KvCache cache;
  const int32_t* seq_len;   // [B], tokens cached before this one = its position, below 0: skip it
  const int32_t* n_recent;  // [B], 0: full row
  float* lse;               // [B, H_q, 1] contiguous
  float* mass;              // [B, H_q, 2] contiguous, nullptr: not asked for
  void* workspace;          // the backend's workspace_bytes(params), at least 64-byte aligned
  DType dtype;
  int64_t batch, n_heads, n_kv_heads, head_dim;
  float scale;
  int64_t n_sink;
  RetainedWindow window;  // the window whose mass is measured

  LT_HOST_DEVICE constexpr Ring ring(int64_t b) const { return {n_sink, n_recent[b]}; }
};

struct MergeStatesParams {
  Activation out_a, out_b, out;  // [B, S, H, D]
  const float *lse_a, *lse_b;    // [B, H, S]
  float* lse;                    // [B, H, S]
  int64_t lse_a_strides[3], lse_b_strides[3], lse_strides[3];
  DType dtype;
  int64_t batch, n_tokens, n_heads, head_dim;
};

}  // namespace lighttransfer
