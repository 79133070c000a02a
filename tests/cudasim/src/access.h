// Memory accesses of a warp: addresses, checks, counters. Shared by loads, stores, atomics,
// cp.async and ldmatrix.
#pragma once

#include <cstdint>

#include "exec.h"
#include "memory.h"

namespace cudasim {

enum class Space : uint8_t { kGlobal, kShared, kLocal, kParam, kConst, kGeneric };

Space parse_space(const PtxInst& p);

// base register (or constant) + immediate, one address a lane
inline void lane_addresses(const Warp& w, int32_t base, int base_bytes, int64_t imm,
                           uint64_t* address) {
  if (base_bytes == 8) {
    const uint64_t* b = in<uint64_t>(w, base);
    for (int l = 0; l < kWarpSize; ++l) address[l] = b[l] + uint64_t(imm);
  } else {
    const uint32_t* b = in<uint32_t>(w, base);
    for (int l = 0; l < kWarpSize; ++l) address[l] = uint32_t(b[l] + uint32_t(imm));
  }
}

// Each returns the lanes whose access is allowed; the others have become findings.
uint32_t check_global(Warp& w, uint32_t mask, const uint64_t* address, int bytes, bool write);
uint32_t check_shared(Warp& w, uint32_t mask, const uint64_t* address, int bytes, uint32_t* offset);
uint32_t check_local(Warp& w, uint32_t mask, const uint64_t* address, int bytes, uint32_t* offset);

// The lanes of a generic access by the space that their addresses lie in; space addresses replace
// generic ones.
struct SpaceMasks {
  uint32_t global = 0, shared = 0, local = 0, param = 0;
};
SpaceMasks split_generic(uint32_t mask, uint64_t* address);

void count_shared(Warp& w, uint32_t mask, const uint32_t* offset, int bytes);
void count_global(Warp& w, uint32_t mask, const uint64_t* address, int bytes);

}  // namespace cudasim
