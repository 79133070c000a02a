// The CPU backend: cpu::run(params) for every op.
//
// Kernels that profit from wide registers are compiled once per instruction set, each copy in its
// own namespace, and chosen once at run time (dispatch.cpp).
#pragma once

#include "../params.h"

namespace lighttransfer::cpu {

void run(const CompactKvParams& p);
void run(const AppendKvParams& p);
void run(const GatherKvParams& p);
void run(const RetainedMassParams& p);
void run(const LazyRatioParams& p);
void run(const MergeStatesParams& p);
void run(const StreamingDecodeParams& p);

// What params.workspace must hold; reads the rows' lengths.
int64_t workspace_bytes(const StreamingDecodeParams& p);

// Every kernel that is compiled per instruction set. A copy takes the same params.
#define LT_DECLARE_CPU_KERNELS(isa)         \
  namespace isa {                           \
  void run(const RetainedMassParams& p);    \
  void run(const LazyRatioParams& p);       \
  void run(const MergeStatesParams& p);     \
  void run(const StreamingDecodeParams& p); \
  }

LT_DECLARE_CPU_KERNELS(baseline)
LT_DECLARE_CPU_KERNELS(avx2)
LT_DECLARE_CPU_KERNELS(avx512)
#undef LT_DECLARE_CPU_KERNELS

// "baseline", "avx2" or "avx512": what this process runs. LIGHTTRANSFER_CPU_ISA=NAME in the
// environment lowers it.
const char* isa_name();

}  // namespace lighttransfer::cpu
