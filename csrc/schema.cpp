// Every op's schema. What each op does stands with its Python function in lighttransfer/ops.
#include <torch/csrc/stable/library.h>

#include "bind/namespace.h"

STABLE_TORCH_LIBRARY(LIGHTTRANSFER_NAMESPACE, library) {
  library.def(
      "prefill_attn(Tensor q, Tensor k, Tensor v, *, float? scale=None, bool causal=True, "
      "int n_sink=0, int n_recent=-1, Tensor? seq_start=None) -> (Tensor out, Tensor lse)");
  library.def(
      "prefill_attn_lazy(Tensor q, Tensor k, Tensor v, *, int n_sink, int n_recent, int n_last, "
      "float? scale=None, Tensor? seq_start=None) -> (Tensor out, Tensor lse, Tensor mass)");
  library.def(
      "retained_mass(Tensor q_last, Tensor k, Tensor lse_last, *, int n_sink, int n_recent, "
      "float? scale=None, Tensor? seq_start=None) -> Tensor mass");
  library.def("lazy_ratio(Tensor mass, *, Tensor? n_queries=None) -> Tensor ratio");
  library.def(
      "compact_kv_(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor seq_len, *, int n_sink, "
      "int n_recent, Tensor? block_table=None, Tensor? rows=None) -> ()");
  library.def(
      "append_kv_(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor seq_len, *, "
      "int n_sink, Tensor n_recent, Tensor? block_table=None, Tensor? seq_start=None) -> ()");
  library.def(
      "gather_kv(Tensor k_cache, Tensor v_cache, Tensor seq_len, *, int n_sink, Tensor n_recent, "
      "int max_len, Tensor? block_table=None) -> (Tensor k, Tensor v, Tensor seq_start)");
  library.def(
      "streaming_decode(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
      "Tensor seq_len, *, int n_sink, Tensor n_recent, int mass_n_recent=-1, "
      "Tensor? block_table=None, float? scale=None) -> (Tensor out, Tensor lse, Tensor mass)");
  library.def(
      "merge_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) "
      "-> (Tensor out, Tensor lse)");
#ifndef LIGHTTRANSFER_SIMULATOR
  library.def("cpu_isa() -> str");
#endif
}
