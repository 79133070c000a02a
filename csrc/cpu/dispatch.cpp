#include <cstdlib>
#include <cstring>

#include "decode_split.h"
#include "kernels.h"

namespace lighttransfer::cpu {
namespace {

enum class Isa { kBaseline, kAvx2, kAvx512 };

Isa detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16");
  const char* limit = std::getenv("LIGHTTRANSFER_CPU_ISA");
  if (limit != nullptr && std::strcmp(limit, "baseline") == 0) return Isa::kBaseline;
  if (avx512 && !(limit != nullptr && std::strcmp(limit, "avx2") == 0)) return Isa::kAvx512;
  if (avx2) return Isa::kAvx2;
#endif
  return Isa::kBaseline;
}

Isa isa() {
  static const Isa chosen = detect();
  return chosen;
}

template <class Params>
void dispatch(const Params& p) {
#if defined(__x86_64__)
  switch (isa()) {
    case Isa::kAvx512:
      return avx512::run(p);
    case Isa::kAvx2:
      return avx2::run(p);
    case Isa::kBaseline:
      break;
  }
#endif
  baseline::run(p);
}

}  // namespace

const char* isa_name() {
  switch (isa()) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kBaseline:
      break;
  }
  return "baseline";
}

void run(const RetainedMassParams& p) {
  dispatch(p);
}

void run(const LazyRatioParams& p) {
  dispatch(p);
}

void run(const MergeStatesParams& p) {
  dispatch(p);
}

void run(const StreamingDecodeParams& p) {
  dispatch(p);
}

int64_t workspace_bytes(const StreamingDecodeParams& p) {
  return DecodeSplits(p).bytes();
}

}  // namespace lighttransfer::cpu
