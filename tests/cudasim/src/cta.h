// One cooperative thread array: warps, barriers, shared memory, and the counters of the thread that
// simulates it.
#pragma once

#include <atomic>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "findings.h"
#include "inst.h"
#include "memory.h"
#include "shadow.h"
#include "warp.h"

namespace cudasim {

struct Options {
  uint64_t max_instructions = 1ull << 32;  // warp instructions a launch
  uint64_t seed = 0;          // 0: warps run in order until they block; else a random schedule
  int threads = 2;            // host threads that share the CTAs
  bool strict_memory = true;  // an address in no registered buffer is a finding
  bool race_check = true;
};

struct PcCounter {
  uint64_t executed = 0, wavefronts = 0, ideal_wavefronts = 0, sectors = 0, ideal_sectors = 0;
};

struct Launch {
  const Program* program = nullptr;
  uint32_t grid[3] = {1, 1, 1}, block[3] = {1, 1, 1};
  int64_t dynamic_shared = 0;
  std::vector<uint8_t> params;
  std::shared_ptr<const BufferTable> buffers;
  FindingSink* findings = nullptr;
  Options options;
  uint64_t grid_id = 0;
  mutable std::atomic<int64_t> budget{0};  // warp instructions left
};

struct Barrier {
  bool open = false;      // somebody has arrived
  int64_t expected = -1;  // threads; -1: every live thread
  int reduction = 0;      // 0 none, 1 popc, 2 and, 3 or
  int pc = 0;             // of the first arrival
  int64_t arrived = 0;    // threads
  uint32_t popc = 0;
  bool all = true, any = false;
  std::vector<uint32_t> lanes;         // per warp: lanes that arrived
  std::vector<int> arrivers, waiters;  // warps
};

struct Cta {
  const Launch* launch = nullptr;
  const Program* program = nullptr;
  int block[3] = {0, 0, 0};
  int threads = 0;
  std::vector<uint8_t> shared_storage;
  uint8_t* shared = nullptr;
  int64_t shared_size = 0;
  SharedShadow shadow;
  std::vector<Warp> warps;
  std::vector<PcCounter> counters;
  Barrier barriers[16];
  std::mt19937_64 random;

  void prepare(const Launch& l);  // once a launch and host thread
  bool run(uint64_t index);       // false: the launch cannot go on
  void report(const char* kind, int pc, const Warp* w, int lane, const std::string& message);
  // One warp's arrival at a barrier; `wait` false: bar.arrive. The caller parks the split and tries
  // the release.
  void arrive(Warp& w, int id, int64_t expected, int reduction, bool wait, uint32_t mask,
              uint32_t predicate);
  void try_release(int id);

 private:
  void begin(uint64_t index);
  void finish();
  void report_deadlock();
  std::vector<uint8_t> files_, locals_;
  int64_t file_bytes_ = 0;
};

void fill_specials(Warp& w);

}  // namespace cudasim
