// What the files of the runtime's C interface share: error codes and the limits of the simulated
// device, an A100.
#pragma once

#include <cstdint>

#include "runtime.h"

namespace cudasim::api {

constexpr int kSuccess = 0, kInvalidValue = 1, kMemoryAllocation = 2;
constexpr int kMaxThreadsPerSm = 2048, kMaxBlocksPerSm = 32;
constexpr int64_t kSharedPerSm = 164 * 1024, kReservedSharedPerBlock = 1024;

inline int fail(int error) {
  Runtime::instance().set_error(error);
  return error;
}

}  // namespace cudasim::api
