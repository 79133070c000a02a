// Storage for virtual registers. nvcc's PTX is close to SSA: thousands of registers, of which few
// live at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "ptx.h"

namespace cudasim {

struct RegisterMap {
  std::vector<int32_t> offset;  // of each virtual register in the warp's file; -1: never used
  int64_t bytes = 0;            // of the file
};

// How many leading operands an instruction writes: 0 or 1 (a vector or a pair p|q counts as one).
int destination_count(const PtxInst& inst);

// Linear scan over live intervals. Sound under divergence because each lane has storage of its own;
// a guarded write does not end the old value's life. `first` is where the file's free part starts.
RegisterMap allocate_registers(const Kernel& kernel, int64_t first);

}  // namespace cudasim
