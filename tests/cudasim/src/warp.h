// One warp: its register file, its divergent splits and its copies in flight.
#pragma once

#include <climits>
#include <cstdint>
#include <vector>

#include "inst.h"

namespace cudasim {

struct Cta;
struct Buffer;

// Lanes of a warp that share a program counter.
struct Split {
  enum class State : uint8_t { kReady, kWaiting, kBarrier };
  int pc = 0;
  uint32_t mask = 0;
  State state = State::kReady;
  int barrier = -1;
};

struct AsyncCopy {
  uint32_t mask = 0;  // lanes still in flight
  int bytes = 0, pc = 0;
  uint32_t dst[kWarpSize];
  uint64_t src[kWarpSize];
  uint8_t src_bytes[kWarpSize];
  uint32_t group[kWarpSize];
};

struct Warp {
  uint8_t* regs = nullptr;
  const uint8_t* consts = nullptr;
  Cta* cta = nullptr;
  int id = 0;
  int pc = 0;
  int next_stop =
      INT_MAX;          // the lowest pc of another split that may be met: look for a merge there
  uint32_t active = 0;  // lanes of the running split
  uint32_t live = 0;    // lanes that have not exited
  uint32_t taken = 0;   // of a divergent branch
  uint32_t carry = 0;   // CC.CF, one bit a lane
  int barrier = -1;     // that a kBarrier step waits at
  std::vector<Split> splits;  // the others
  std::vector<AsyncCopy> copies;
  uint32_t committed[kWarpSize] = {};
  uint8_t* local = nullptr;  // [lane][local_size]
  const Buffer* last_buffer = nullptr;
  bool blocked = false;

  // Picks the ready split with the lowest pc, after merging splits that met. False: nothing is
  // ready.
  bool reschedule();
  void park(Split::State state, int barrier = -1);  // the running split goes to the others
  void wake_waiting();
};

// Runs a warp until it blocks, ends, or has executed `quantum` instructions.
enum class RunResult { kBlocked, kDone, kQuantum, kAbort };
RunResult run_warp(Warp& w, uint64_t quantum, uint64_t& executed);

}  // namespace cudasim
